"""What follows the last hidden states or pooling, in float32 without torch. N rows, H hidden, D outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.errors import Unsupported
from bertopt.modeling.families import FAMILIES

if TYPE_CHECKING:
    from bertopt.core import Array, Spec

FILE = "head.safetensors"
#: x [N, H], weight [D, H] and bias [D] to [N, D].
Linear = Callable[[Any, Any, Any], Any]

_POOLED = ("mean", "late")
_PER_TOKEN = {"token-classification": ("classifier",), "question-answering": ("qa_outputs",)}
_MODERNBERT = dict.fromkeys(_PER_TOKEN, FAMILIES["modernbert"].classifier)


@dataclass(frozen=True)
class FloatHead:
    """Linear layers, norms and functions, one after the other. `tensors` has `<name>.weight` [D, H] and `<name>.bias` [D]; of a norm
    `<name>.weight` [H], `<name>.bias` [H] and `<name>.epsilon` [1]. A first step `mean` is the encoder's; `late`, whoever calls takes
    the mean of the answers to a text's tokens."""

    steps: tuple[str, ...]
    tensors: Mapping[str, Array]

    @property
    def pooling(self) -> str:
        """What a classifier reads of a text: its `first` token, the `mean` of its tokens, or (`late`) each of them."""
        return self.steps[0] if self.steps[0] in _POOLED else "first"

    @classmethod
    def of(cls, spec: Spec, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> FloatHead | None:
        """Return the head of a task from what `plain` returns, None where the encoder itself gives the answer: hidden or pooled states, or
        what it makes over the vocabulary.

        Where layers follow pooling, the head has these, and normalisation after them.

        Raises Unsupported for families and ways of pooling that the native encoder does not know.
        """
        family = FAMILIES.get(spec.family)
        if family is None or not family.native:
            known = ", ".join(name for name, one in FAMILIES.items() if one.native)
            raise Unsupported(f"the native encoder runs {known}; got {spec.family}: use convert_openvino")
        if spec.pooling in ("splade_sum", "splade_sum_log1p"):
            raise Unsupported(f"the native encoder has no {spec.pooling} pooling, only the largest weights; use convert_openvino")
        if spec.over_vocabulary:
            return None
        if spec.task == "feature-extraction":
            return cls._after_pooling(spec, tensors) if spec.dense else None
        heads = {"text-classification": family.classifier, **(_MODERNBERT if spec.family == "modernbert" else _PER_TOKEN)}
        steps = heads[spec.task]
        if spec.family == "modernbert":
            tensors = _modernbert(tensors, config)
        if spec.family in ("deberta", "deberta-v2") and spec.granularity == "text":
            _only_gelu(config, "pooler_hidden_act")
        if spec.family == "roformer" and spec.granularity == "text":
            _only_gelu(config, "hidden_act")
        names = [f"{step}.{part}" for step in steps if step not in _FUNCTIONS for part in ("weight", "bias")]
        names += [f"{step}.epsilon" for step in steps if f"{step}.epsilon" in tensors]
        if missing := [name for name in names if name not in tensors]:
            raise Unsupported(f"expected tensor '{missing[0]}' in the head of {spec.family}; it has none: use convert_openvino")
        if spec.granularity == "text" and family.states_pooling and config["classifier_pooling"] in _POOLED:
            steps = (config["classifier_pooling"], *steps)
        return cls(steps, {name: np.ascontiguousarray(tensors[name], np.float32) for name in names})

    @classmethod
    def _after_pooling(cls, spec: Spec, tensors: Mapping[str, Array]) -> FloatHead:
        steps = [step for layer in spec.dense for step in (layer.folder, layer.activation) if step != "identity"]
        names = [f"{layer.folder}.{part}" for layer in spec.dense for part in ("weight", "bias")]
        return cls((*steps, *(("normalize",) if spec.normalize else ())), {name: tensors[name] for name in names})

    @classmethod
    def read(cls, path: Path) -> FloatHead:
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            return cls(tuple(json.loads(file.metadata()["steps"])), {name: file.get_tensor(name) for name in names})

    def write(self, path: Path) -> None:
        from safetensors.numpy import save_file

        save_file(dict(self.tensors), path, {"steps": json.dumps(self.steps)})

    @np.errstate(under="ignore")
    def __call__(self, hidden: Array, linear: Linear) -> Array:
        """Return the outputs [N, D] of hidden states [N, H]. Rows do not depend on each other where `linear`'s do not; a
        BLAS's do, to the last bit."""
        values: Any = hidden
        for step in self.steps[self.pooling in _POOLED :]:
            if step in _FUNCTIONS:
                values = _FUNCTIONS[step](values)
            elif f"{step}.epsilon" in self.tensors:
                values = _layer_norm(values, *(self.tensors[f"{step}.{part}"] for part in ("weight", "bias", "epsilon")))
            else:
                values = linear(values, self.tensors[f"{step}.weight"], self.tensors[f"{step}.bias"])
        return np.asarray(values)


def plain(network: Any) -> tuple[dict[str, Any], dict[str, Array], dict[str, Array]]:
    """Return the configuration of a network, its encoder's tensors and those after pooling, in float32, without transformers' classes
    or torch's. A layer after pooling has zeros where it has no bias."""
    encoder, pooling = network.encoder, network.pooling
    tensors = {name: _array(tensor) for name, tensor in encoder.state_dict().items()}
    # Of ESM they may be others than config.json's; see `esm.prepare`.
    tensors |= {name: _array(tensor) for name, tensor in encoder.named_buffers() if name.endswith("rotary_embeddings.inv_freq")}
    products = pooling.dense.products if pooling is not None and pooling.dense is not None else ()
    after: dict[str, Array] = {}
    for layer, product in zip(network.spec.dense, products, strict=True):
        after[f"{layer.folder}.weight"] = _array(product.weight)
        after[f"{layer.folder}.bias"] = np.zeros(layer.size, np.float32) if product.bias is None else _array(product.bias)
    return json.loads(encoder.config.to_json_string(use_diff=False)), tensors, after


def _modernbert(tensors: Mapping[str, Array], config: Mapping[str, Any]) -> Mapping[str, Array]:
    """The head's tensors with zeros where it has no bias, and the norm's epsilon. Raises Unsupported for another function than GELU."""
    _only_gelu(config, "classifier_activation")
    biases = {name: np.zeros(config["hidden_size"], np.float32) for name in ("head.dense.bias", "head.norm.bias")}
    return {**biases, **tensors, "head.norm.epsilon": np.array([config["norm_eps"]], np.float32)}


def _only_gelu(config: Mapping[str, Any], field: str) -> None:
    if (activation := config.get(field)) != "gelu":
        raise Unsupported(f"the native encoder's head has {field} 'gelu'; got {activation!r}: use convert_openvino")


def _array(tensor: Any) -> Array:
    array: Array = tensor.detach().float().cpu().numpy()
    return array


def _layer_norm(x: Any, weight: Array, bias: Array, epsilon: Array) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * weight + bias


def _relu(x: Any) -> Any:
    return np.maximum(x, np.float32(0))


def _normalize(x: Any) -> Any:
    """Rows of length 1, as torch's: a row of zeros stays."""
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), np.float32(1e-12))


def _gelu(x: Any) -> Any:
    """x Φ(x). erfc by Chebyshev's fit of Numerical Recipes (Press et al., section 6.2), 1.2e-7 off at most."""
    z = x.astype(np.float64) / np.sqrt(2)
    t = 1 / (1 + np.abs(z) / 2)
    fit = np.polynomial.polynomial.polyval(t, _ERFC)
    erfc = t * np.exp(-z * z + fit)
    return (x * (np.where(z >= 0, 2 - erfc, erfc) / 2)).astype(np.float32)


_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {"tanh": np.tanh, "relu": _relu, "gelu": _gelu, "normalize": _normalize}
