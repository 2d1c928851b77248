"""Layers between pooling and normalisation, in float32. B texts, H numbers of a pooled vector, D of an embedding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from bertopt.errors import IntegrityError
from bertopt.modeling.modules_json import WEIGHTS
from bertopt.spec import DenseLayer
from bertopt.system.untrusted import plain

_WEIGHT, _BIAS = "linear.weight", "linear.bias"
_FUNCTIONS = {"identity": nn.Identity, "tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


class Dense(nn.Module):
    """Vectors [..., H] to [..., D], one layer after another."""

    def __init__(self, layers: tuple[DenseLayer, ...], products: list[nn.Linear]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)
        self.functions = nn.ModuleList(_FUNCTIONS[layer.activation]() for layer in layers)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        for product, function in zip(self.products, self.functions, strict=True):
            vectors = function(product(vectors))
        return vectors


def load(directory: Path, layers: tuple[DenseLayer, ...], hidden: int) -> Dense | None:
    """Return the layers with their weights from `directory`, the first of which reads vectors of `hidden` numbers; None where
    there are none.

    Raises IntegrityError where the weights are missing, unsafe, not finite, or do not fit each other.
    """
    products, width = list[nn.Linear](), hidden
    for layer in layers:
        products.append(_product(directory / layer.folder / WEIGHTS, layer, width))
        width = layer.size
    return Dense(layers, products) if layers else None


def _product(path: Path, layer: DenseLayer, width: int) -> nn.Linear:
    tensors = _tensors(path)
    expected = {_WEIGHT: [layer.size, width], **({_BIAS: [layer.size]} if _BIAS in tensors else {})}
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise IntegrityError(f"'{path}' must hold {_shown(expected)}; got {_shown(found)}: restore the checkpoint")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise IntegrityError(f"'{path}': tensor '{name}' must hold finite floating-point numbers; got others: restore the checkpoint")
    product = nn.Linear(width, layer.size, bias=_BIAS in tensors)
    product.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in tensors.items()})
    return product


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        pickled = path.with_name("pytorch_model.bin")
        raise IntegrityError(
            f"expected '{path}'; got pytorch_model.bin, which can run code when loaded; if you trust it, save the model again: SentenceTransformer(DIR).save(NEW)"
            if pickled.is_file() else f"'{path}' is missing; fetch the checkpoint again"
        )  # fmt: skip
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"'{path}' is damaged ({error}); fetch the checkpoint again") from error


def _shown(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{plain(name)} {shape}" for name, shape in sorted(shapes.items())) or "no tensor"
