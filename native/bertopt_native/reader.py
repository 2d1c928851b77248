"""Take tensors and numbers out of a checkpoint, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Reader:
    """Takes tensors out of a state dict, under new names."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str) -> None:
        bare = (
            {k.removeprefix(prefix): v for k, v in tensors.items()}
            if any(k.startswith(prefix) for k in tensors)
            else dict(tensors)
        )
        self.source = {
            k.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): v
            for k, v in bare.items()
        }
        self.out: dict[str, Floats] = {}

    def take(self, name: str, *shape: int | None) -> Floats:
        if name not in self.source:
            raise ValueError(
                f"expected a tensor {name!r} in the checkpoint; it has {len(self.source)} others: check model_type in its config"
            )
        a = np.asarray(self.source[name]).astype(np.float32)
        if a.ndim != len(shape) or any(e is not None and e != g for e, g in zip(shape, a.shape, strict=True)):
            raise ValueError(
                f"tensor {name!r} must have shape {list(shape)}; got {list(a.shape)}: config and weights differ"
            )
        if not np.isfinite(a).all():
            raise ValueError(f"tensor {name!r} has NaN or infinite values: the checkpoint is damaged, get it again")
        return a

    def norm(self, to: str, name: str, width: int, bias: bool = True) -> None:
        self.out[f"{to}.weight"] = self.take(f"{name}.weight", width)
        self.out[f"{to}.bias"] = self.take(f"{name}.bias", width) if bias else np.zeros(width, np.float32)

    def linear(self, to: str | tuple[str, ...], name: str, n: int, k: int, bias: bool = True) -> None:
        """Take one product of `n` outputs, or several that lie one after the other."""
        names = (to,) if isinstance(to, str) else to
        parts = {"weight": self.take(f"{name}.weight", n * len(names), k)}
        parts["bias"] = self.take(f"{name}.bias", n * len(names)) if bias else np.zeros(n * len(names), np.float32)
        for part, whole in parts.items():
            self.out |= {f"{one}.{part}": values for one, values in zip(names, np.split(whole, len(names)), strict=True)}

    def by_head(self, to: str, name: str, hidden: int, heads: int) -> None:
        """Take the query, key and value of a DeBERTa, whose rows lie in one tensor head by head, and biases of two of them."""
        rows = self.take(f"{name}.in_proj.weight", 3 * hidden, hidden).reshape(heads, 3, -1, hidden)
        biases = self.take(f"{name}.q_bias", hidden), np.zeros(hidden, np.float32), self.take(f"{name}.v_bias", hidden)
        for at, (product, bias) in enumerate(zip(("query", "key", "value"), biases, strict=True)):
            self.out[f"{to}.{product}.weight"] = np.ascontiguousarray(rows[:, at].reshape(hidden, hidden))
            self.out[f"{to}.{product}.bias"] = bias

    def repeat_heads(self, name: str, heads: int, times: int) -> None:
        """Repeat each of a product's `heads`, which as many heads of queries share."""
        for part in ("weight", "bias"):
            values = self.out[f"{name}.{part}"]
            self.out[f"{name}.{part}"] = np.repeat(values.reshape(heads, -1, *values.shape[1:]), times, axis=0).reshape(-1, *values.shape[1:])

    def part_neighbours(self, name: str, heads: int) -> None:
        """Put each head's channels 0, 2, 4, … of a product before its channels 1, 3, 5, …. Scores stay if queries' and keys' are moved alike."""
        for part in ("weight", "bias"):
            values = self.out[f"{name}.{part}"]
            pairs = values.reshape(heads, -1, 2, *values.shape[1:])
            self.out[f"{name}.{part}"] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config's {name} must be a whole number above 0; got {value!r}")
            return value
    raise ValueError(f"config must have {names[0]}")
