"""Half precision for an eager network: weights cast, or autocast around the forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch

#: A module with this many direct linear layers is an attention: query, key, value.
_ATTENTION_PROJECTIONS = 3
#: Modules that multiply by their children's weights themselves: kept whole, if in part.
_READERS = ("MobileBertLMPredictionHead",)


class CastHalf(Pass[Eager, Eager]):
    """Cast the encoder to half precision; pooling, normalisation, answers and the frequencies of rotary positions stay float32.

    `cast` halves the weights; `autocast` keeps them in float32 and casts the inputs of matrix products, LayerNorm
    and softmax staying in float32. Counts the tensors cast, or the linear layers autocast.
    """

    incompatible_with: ClassVar[dict[str, str]] = {"cast_half": "the network is in half precision already"}

    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="the half-precision type")
    mode: Literal["cast", "autocast"] = Field("cast", description="cast the weights, or the inputs of each product")
    keep_fp32: tuple[str, ...] = Field(
        (), description="modules to leave in float32: names, ends of names or patterns, such as layer.3.output"
    )

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if self.mode == "autocast":
            if self.keep_fp32:
                return "keep_fp32 goes with mode: cast; autocast keeps weights, LayerNorm and softmax in float32 itself"
            if any(step.name() == "use_better_transformer" for step in before):
                return "autocast does not reach into nn.TransformerEncoder's fast path, which would stay float32; use mode: cast"
        return super().conflict(before)

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        if self.dtype == "float16" and ctx.device == "cpu" and not native_fp16():
            raise Unsupported(
                "this CPU has no native fp16 arithmetic, which makes it 100 times slower than float32; use dtype: bfloat16 or device: cuda"
            )
        return model.rewritten(self, precision=self.dtype)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        import torch

        dtype = getattr(torch, self.dtype)
        encoder: Any = network.encoder
        if self.mode == "autocast":
            network.autocast_dtype = dtype
            return {"linear_layers": sum(isinstance(module, torch.nn.Linear | torch.nn.Conv1d) for module in encoder.modules())}
        kept = kept_modules(encoder, self.keep_fp32)
        spared = {id(tensor) for module in kept for tensor in _floats(module)}
        tensors = [t for t in _floats(encoder) if t.dtype != dtype and id(t) not in spared]
        for tensor in tensors:
            tensor.data = tensor.data.to(dtype)
        if kept:
            _bridge(encoder, kept, dtype)
        return {"tensors": len(tensors)}

    def effects(self, model: Eager, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        import torch

        network: Any = model.network
        dtype = getattr(torch, self.dtype)
        if self.mode == "autocast":
            answers = _linear_dtypes(network)
            return {f"linear layers computed in {self.dtype}": (max(1, len(answers)), answers.count(dtype))}
        spared = {id(t) for module in kept_modules(network.encoder, self.keep_fp32) for t in _floats(module)}
        tensors = _floats(network.encoder)
        cast = [t for t in tensors if id(t) not in spared]
        shown = {f"encoder tensors in {self.dtype}": (max(1, len(cast)), sum(t.dtype == dtype for t in cast))}
        if spared:
            kept = [t for t in tensors if id(t) in spared]
            shown["encoder tensors kept in float32"] = (len(kept), sum(t.dtype == torch.float32 for t in kept))
        return shown


def kept_modules(encoder: Any, patterns: Sequence[str]) -> list[Any]:
    """The outermost modules that the patterns name, those that share a weight with one of them, and those that read such a weight.

    Raises Unsupported for a pattern that names none.
    """
    from bertopt.modeling.encoder_layers import chosen

    modules = {name: module for name, module in encoder.named_modules() if name}
    named = chosen(modules, patterns, "keep_fp32")
    weights = {id(tensor) for name in named for tensor in _floats(modules[name])}
    named |= {name for name, module in modules.items() if weights & {id(t) for t in module.parameters(recurse=False)}}
    named |= {name for name, module in modules.items() if type(module).__name__ in _READERS and any(f"{name}.{child}" in named for child, _ in module.named_children())}
    parts = {name: name.split(".") for name in named}
    inner = {name for name in named for length in range(1, len(parts[name])) if ".".join(parts[name][:length]) in named}
    return [modules[name] for name in modules if name in named - inner]


def _bridge(encoder: Any, kept: Sequence[Any], dtype: torch.dtype) -> None:
    """Let every module cast what it is given to its own precision. What a kept one gives stays float32 until then.

    Query, key and value meet without a module between them, and with the mask: they are given in half precision
    unless all of the attention is kept.
    """
    import torch

    inside = {id(module) for outer in kept for module in outer.modules()}
    half = functools.partial(_cast_inputs, of=(torch.float32,), to=dtype)
    masks = functools.partial(_cast_inputs, of=(torch.float32,), to=dtype, dims=4)
    for outer in kept:
        outer.register_forward_pre_hook(
            functools.partial(_cast_inputs, of=(torch.bfloat16, torch.float16), to=torch.float32), with_kwargs=True
        )
    for module in encoder.modules():
        if id(module) in inside:
            continue
        weighs = any(t.is_floating_point() for t in module.parameters(recurse=False))
        module.register_forward_pre_hook(half if weighs else masks, with_kwargs=True)
        linear = [child for child in module.children() if isinstance(child, torch.nn.Linear | torch.nn.Conv1d)]
        for child in linear if len(linear) >= _ATTENTION_PROJECTIONS else ():
            if id(child) in inside:
                child.register_forward_hook(functools.partial(_cast_answer, to=dtype))


def _cast_inputs(_: Any, args: Any, named: Any, of: tuple[Any, ...], to: Any, dims: int | None = None) -> Any:
    return _each(args, of, to, dims), _each(named, of, to, dims)


def _cast_answer(_: Any, __: Any, answer: Any, to: Any) -> Any:
    return answer.to(to)


def _each(value: Any, of: tuple[Any, ...], to: Any, dims: int | None) -> Any:
    """`value` with every tensor in it cast whose type is one of `of`, and that has `dims` dimensions where given."""
    if isinstance(value, dict):
        return {key: _each(inner, of, to, dims) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_each(inner, of, to, dims) for inner in value)
    return value.to(to) if getattr(value, "dtype", None) in of and dims in (None, value.dim()) else value


def _floats(encoder: Any) -> list[torch.Tensor]:
    """Return what is stored with the weights. Tables that the configuration gives stay float32, as transformers leaves them where it loads a
    model in half precision: a position times a frequency is an angle of up to thousands, which a rounded frequency turns by whole turns."""
    stored = {id(tensor): tensor for tensor in encoder.state_dict(keep_vars=True).values()}
    return [tensor for tensor in stored.values() if tensor.is_floating_point()]


def _linear_dtypes(network: Any) -> list[torch.dtype]:
    """What type every linear layer of the encoder gives, call by call of one forward."""
    import torch

    given: list[torch.dtype] = []
    hooks = [
        module.register_forward_hook(lambda _, __, answer: given.append(answer.dtype))
        for module in network.encoder.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d)
    ]
    network.run_example(hooks=hooks)
    return given


def native_fp16() -> bool:
    """Whether the CPU computes in fp16 (x86 AVX512-FP16, Arm FPHP), read from /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return bool(words & {"avx512_fp16", "fphp", "asimdhp"})
