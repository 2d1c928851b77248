"""Record, and replace, what the modules of a torch network give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bertopt.debug.trace_points import Traced, bare

if TYPE_CHECKING:
    from bertopt.core import Array


def trace(
    network: Any, inputs: Mapping[str, Array], answers: Sequence[str], layers: int,
    given: Mapping[str, Array] | None = None,
) -> Traced:  # fmt: skip
    """Run `network` uncompiled on int64 [B, S] inputs; keep every module output that is [B, S, D] or [B, D].

    Where `given` has a module's output, it is recorded and then replaced: what follows computes from the given one.
    """
    record = _Record(next(iter(inputs.values())).shape, given or {})
    restore = [_wrap(module, name, record) for name, module in network.named_modules() if name]
    device = next(network.parameters()).device
    try:
        with torch.inference_mode():
            # forward, not __call__: a compiled network is run as the eager one it was.
            out = network.forward(*(torch.from_numpy(inputs[name]).to(device) for name in network.inputs))
    finally:
        for undo in restore:
            undo()
    for name, value in zip(answers, out, strict=False):
        record.keep(name, value)
    return Traced(
        {key: _array(value, record.shape) for key, value in record.values.items()},
        {key: tuple(names) for key, names in record.same.items()},
        _layers(network, record, layers),
        record.calls,
    )


class _Record:
    def __init__(self, shape: tuple[int, ...], given: Mapping[str, Array]) -> None:
        self.shape, self.given = shape, given
        self.values: dict[str, torch.Tensor] = {}
        self.same: dict[str, list[str]] = {}
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self._keys: dict[tuple[object, ...], str] = {}

    def keep(self, key: str, value: torch.Tensor) -> None:
        # The very same tensor, under the name of the outermost module that gives it.
        identity = (value.data_ptr(), tuple(value.shape), value.dtype) if not value.is_nested else (id(value),)
        known = self._keys.get(identity)
        names = self.same.pop(known) if known is not None else []
        if known is not None:
            del self.values[known]
        self._keys[identity] = key
        self.values[key], self.same[key] = value, [*names, key]
        self.order.append(key)

    def fits(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return False
        if value.is_nested:
            return True
        lead = tuple(value.shape[:2])
        return (value.dim() == 3 and lead == self.shape) or (value.dim() == 2 and lead[0] == self.shape[0])


def _wrap(module: Any, name: str, record: _Record) -> Callable[[], None]:
    forward = module.forward

    def wrapped(*args: Any, **options: Any) -> Any:
        out = forward(*args, **options)
        call = record.calls[name]
        record.calls[name] += 1
        key = f"{name}@{call}" if call else name
        value = out[0] if isinstance(out, tuple) and out else out
        if not record.fits(value):
            return out
        record.keep(key, value)
        if key not in record.given:
            return out
        replaced = _like(torch.from_numpy(record.given[key]), value)
        return (replaced, *out[1:]) if isinstance(out, tuple) else replaced

    return replace_forward(module, wrapped)


def replace_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let `module` run `forward`, and return what undoes that.

    Not a hook: torch's encoder fast path gives way to a slower one where a module has hooks.
    """
    own = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _like(given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    given = given.to(value.device, value.dtype)
    if not value.is_nested:
        return given
    return torch.nested.as_nested_tensor([row[: len(mine)] for row, mine in zip(given, value.unbind(), strict=True)])


def _array(value: torch.Tensor, shape: tuple[int, ...]) -> Any:
    if value.is_nested:
        value = torch.nested.to_padded_tensor(value, 0.0, (*shape, value.size(2)))
    return value.float().cpu().numpy()


def _layers(network: Any, record: _Record, layers: int) -> tuple[str, ...]:
    """The keys of the encoder's layers: the children of the list that ran once a layer."""
    for name, module in network.named_modules():
        children = {f"{name}.{child}" for child, _ in module.named_children()}
        if isinstance(module, torch.nn.ModuleList) and sum(record.calls[child] for child in children) == layers:
            return tuple(key for key in record.order if bare(key) in children)
    return ()
