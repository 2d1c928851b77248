"""Weights packed for the native encoder, which runs texts without padding."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Eager, HalfRounding, Int8Rounding, Native, Pass, Precision, Result, RuntimeFacts, Spec
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.system import native_import

if TYPE_CHECKING:
    from collections.abc import Sequence

_PRODUCTS = ("qkv", "attention_out", "ffn_in", "ffn_out")
#: Of the head over the vocabulary; EuroBERT's is a decoder alone.
_HEAD_PRODUCTS = ("head.dense", "head.decoder")
_PRECISIONS: dict[str, Precision] = {"int8": "int8", "bf16": "bfloat16"}
_WHOLE = "build_native packs the checkpoint's own layers; put it after reference or use_sdpa"


class BuildNative(Pass[Eager, Native]):
    """Pack the weights for bertopt-native, whose kernels run texts one after another without padding.

    `int8` quantises weights here (one scale for each output channel) and activations at run time (scale and zero point for each
    token): nothing is calibrated, and a text's output is the same to the last bit whatever else is in its batch. Attention is bf16 or
    float32, as the CPU allows; norms, pooling and task heads are float32, but the decoder over the vocabulary (fill-mask, SPLADE) is a product
    as those of the layers. Counts products by precision.

    Needs bertopt-native and, to run, an x86-64 CPU with AVX2 or an ARM CPU with dot products. Only bertopt opens the result.
    """

    incompatible_with: ClassVar[dict[str, str]] = dict.fromkeys(
        ("use_better_transformer", "keep_cls_only", "merge_qkv", "pack_sequences", "cast_half"), _WHOLE
    )

    precision: Literal["int8", "bf16"] = Field("int8", description="what the matrix products run in")
    keep_bf16: tuple[str, ...] = Field(
        (),
        description="int8: products to leave in bf16, as layers ('3') or patterns of 'layer.product' ('*.ffn_out', '0.qkv'); "
        f"products are {', '.join(_PRODUCTS)}, and of fill-mask and SPLADE {', '.join(_HEAD_PRODUCTS)}",
    )

    def int8_rounding(self) -> Int8Rounding:
        return Int8Rounding(scales="token", layers_only=True)

    def half_rounding(self) -> HalfRounding:
        return "layer_products"

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        return "the native encoder runs on a CPU; say device: cpu" if device == "cuda" else None

    def __call__(self, model: Eager, ctx: Context) -> Result[Native]:
        from bertopt.modeling.float_head import FILE, FloatHead, plain

        module = native_import.native()
        if not module.supported():
            raise Unsupported("the native encoder needs an x86-64 CPU with AVX2 and FMA or an ARM CPU with dot products; this one lacks them: use convert_openvino")
        if (where := _other_code(model)) is not None:
            raise Unsupported(f"the native encoder takes weights alone, and {where} is not what the checkpoint's code has there: {_WHOLE}, or use convert_openvino")
        config, tensors, after_pooling = plain(model.network)
        head = FloatHead.of(model.spec, {**tensors, **after_pooling}, config)
        path = ctx.workdir / "native" / "model.bin"
        path.parent.mkdir()
        kept = self._kept(model.spec)
        if model.spec.family == "albert" and (kept or config["inner_group_num"] != 1):
            raise Unsupported("ALBERT's layers share weights: the native encoder takes groups of one layer, and no keep_bf16")
        try:
            with native_import.native_errors(module):
                module.pack(path, config, tensors, self.precision, sorted(kept), vocabulary_head=model.spec.over_vocabulary)
        except ValueError as error:
            raise IntegrityError(f"the weights cannot be packed: {error}") from error
        if head is not None:
            head.write(path.with_name(FILE))
        int8, bf16 = self._expected(model.spec)
        # Texts lie one after another in one row.
        spec = model.spec.model_copy(update={"layout": "packed", "row_length": None})
        return Result(Native(spec, _PRECISIONS[self.precision], path), {"int8_products": int8, "bf16_products": bf16})

    def effects(self, model: Native, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """Every product runs in the precision stated for it, by what the encoder says of the file that it opened."""
        runs = facts.products or {}
        int8, bf16 = self._expected(model.spec)
        shown = {"products that run in INT8": (int8, runs.get("int8", 0))}
        shown["products that run in bf16"] = (bf16, runs.get("bf16", 0))
        return {what: counts for what, counts in shown.items() if any(counts)}

    def _kept(self, spec: Spec) -> set[str]:
        """The products that `keep_bf16` names, as 'layer.product'. Raises UsageError for a pattern that fits none."""
        names = _products(spec)
        kept: set[str] = set()
        for pattern in self.keep_bf16:
            fitting = fnmatch.filter(names, pattern if "." in pattern else f"{pattern}.*")
            if not fitting:
                raise UsageError(
                    f"keep_bf16 must name layers from 0 to {spec.layers - 1} or products such as '0.qkv' or '*.ffn_out'; "
                    f"'{pattern}' fits none of {spec.layers} layers with {', '.join((*_PRODUCTS, *names[len(_PRODUCTS) * spec.layers :]))}"
                )
            kept.update(fitting)
        return kept

    def _expected(self, spec: Spec) -> tuple[int, int]:
        """How many products run in INT8 and in bf16."""
        every = len(_products(spec))
        kept = every if self.precision == "bf16" else len(self._kept(spec))
        return every - kept, kept


def _products(spec: Spec) -> list[str]:
    """The products of a model, as 'layer.product'; the head over the vocabulary counts as a layer."""
    names = [f"{layer}.{product}" for layer in range(spec.layers) for product in _PRODUCTS]
    if spec.over_vocabulary:
        names += _HEAD_PRODUCTS[1:] if spec.family == "eurobert" else _HEAD_PRODUCTS
    return names


def _other_code(model: Eager) -> str | None:
    """Return the name of a module, of what hangs on one, or of a field of the configuration, that a pass left otherwise than the checkpoint's
    code has it; None where passes changed weights alone, or how attention is computed."""
    from bertopt.modeling import checkpoint

    if all(record.name == "use_sdpa" for record in model.rewrites):
        return None
    plain: Any = checkpoint.reopen(model.checkpoint, model.spec).network
    # The encoder reads it; torch's layers have read theirs.
    configured, found = (_configuration(network) for network in (plain, model.network))
    if other := next((key for key in sorted({*configured, *found}) if configured.get(key) != found.get(key)), None):
        return f"'encoder.config.{other}'"
    theirs = dict(plain.named_modules())
    for name, module in model.network.named_modules():
        if type(module) is not type(theirs.get(name)):
            return f"'{name}'"
        before, after = vars(theirs[name]), vars(module)
        changed = [key for key, value in before.items() if isinstance(value, bool | int | float | str | tuple) and after.get(key) != value]
        changed += [key for key in ("_forward_hooks", "_forward_pre_hooks") if len(after[key]) != len(before[key])]
        changed += [key for key, value in after.items() if key not in before and callable(value)]
        changed += _other_buffers(theirs[name], module)
        if changed:
            return f"'{name}.{changed[0]}'"
    return None


def _other_buffers(plain: Any, module: Any) -> list[str]:
    """Return the names of a module's own buffers that are not as `plain` has them: the encoder numbers positions and makes frequencies itself."""
    import torch

    before, after = (dict(each.named_buffers(recurse=False)) for each in (plain, module))
    return [key for key, value in before.items() if key not in after or after[key].dtype != value.dtype or not torch.equal(after[key], value)]


def _configuration(network: Any) -> dict[str, Any]:
    """What a network is configured with, but for how attention is computed."""
    fields: dict[str, Any] = network.encoder.config.to_dict()
    return {key: value for key, value in fields.items() if not key.startswith("_")}
