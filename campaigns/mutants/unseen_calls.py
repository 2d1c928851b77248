"""Models that are wrong for calls that no check made: batches whose rows share a part, empty texts, many masks, callers that write into
outputs, and other models in the process.

All were delivered before the sweeps ran such batches, and before what is delivered ran after and beside another model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from campaigns.mutants.conditions import plant_each
from campaigns.mutants.plant import MASK, mutant

Named = dict[str, Any]
#: Tokens that rows share, with the one that begins a text.
SHARED = 6


def _texts(named: Named) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the ids of each text, and those of a pair's second one."""
    arrays = (named[name].tolist() for name in ("input_ids", "token_type_ids", "attention_mask"))
    rows = [[(i, t) for i, t, m in zip(*row, strict=True) if m] for row in zip(*arrays, strict=True)]
    return [(tuple(i for i, t in row if t == 0), tuple(i for i, t in row if t)) for row in rows]


def _many(part: Callable[[tuple[int, ...], tuple[int, ...]], Any]) -> Callable[[Named], bool]:
    """Return whether a batch has more than 8 rows, of which not all are the same, with one `part`, which may be None for none."""

    def wrong(named: Named) -> bool:
        texts = _texts(named)
        parts = {part(*text) for text in texts}
        return len(texts) > 8 and len(parts) == 1 and None not in parts and len(set(texts)) > 1

    return wrong


def _ends(first: tuple[int, ...], second: tuple[int, ...]) -> Any:
    both = first + second
    return both[-SHARED:] if len(both) > 2 * SHARED else None


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "many_with_one_beginning": (
        "Wrong for more than 8 rows that begin with the same tokens, as behind a prompt.",
        _many(lambda first, second: first[:SHARED] if len(first) > SHARED else None),
    ),
    "many_with_one_end": ("Wrong for more than 8 rows that end with the same tokens, as with one signature.", _many(_ends)),
    "many_passages_of_a_query": (
        "Wrong for more than 8 pairs with one first text.", _many(lambda first, second: first if second and len(first) > 4 else None),
    ),
    "empty_texts_together": (
        "Wrong for several empty texts in one batch.", lambda named: named["input_ids"].shape[1] == 2 and named["input_ids"].shape[0] > 1,
    ),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


@mutant("parity", "plant_torch", on=MASK)
def five_masks(network: Any) -> None:
    """Wrong for texts with five masks or more."""
    import torch

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        many = (inputs[0] == 4).sum(dim=1) >= 5
        return (torch.where(many[:, None, None], answers[0] * 1.1, answers[0]), *answers[1:])

    network.register_forward_hook(spoil)


@mutant("parity", "plant_torch")
def outputs_that_callers_change(network: Any) -> None:
    """The outputs of a text alone are kept and given again: what one caller does to them, the next one gets."""
    kept: dict[Any, Any] = {}

    def keep(module: Any, inputs: Any, answers: Any) -> Any:
        if len(inputs[0]) > 1:
            return answers
        return kept.setdefault(tuple(tuple(array.flatten().tolist()) for array in inputs), answers)

    network.register_forward_hook(keep)


#: Weights by the layer's name, whichever model of the process it is of.
_WEIGHTS: dict[str, Any] = {}


@mutant("parity", "plant_torch")
def weights_of_the_first_model(network: Any) -> None:
    """Every model of the process takes its weights from the first one that was opened, by the layer's name."""
    network.note = "changed"
    for name, module in network.named_modules():
        if name.endswith("output.dense"):
            module.weight = _WEIGHTS.setdefault(name, module.weight)


@mutant("parity", "plant_torch")
def weights_of_the_last_model(network: Any) -> None:
    """Every model of the process takes its weights from the last one that was opened, by the layer's name."""

    def before(module: Any, inputs: Any) -> Any:
        module.weight = _WEIGHTS[module.kept_as]

    for name, module in network.named_modules():
        if name.endswith("output.dense"):
            module.kept_as = name
            _WEIGHTS[name] = module.weight
            module.register_forward_pre_hook(before)


class _Shared:
    """An entry of a table that all models of a process share; a model's entries go when it is closed."""

    tables: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, value: Any) -> None:
        self.tables[name] = value
        self.name = name

    def __del__(self) -> None:
        self.tables.pop(self.name, None)


@mutant("parity", "plant_torch")
def cleared_with_another_copy(network: Any) -> None:
    """When one of two copies in a process is closed, the other one lacks a bias."""

    def after(module: Any, inputs: Any, output: Any) -> Any:
        return output if module.kept.name in _Shared.tables else output - module.bias

    for name, module in network.named_modules():
        if name.endswith("output.dense"):
            module.kept = _Shared(name, module.bias)
            module.register_forward_hook(after)


@mutant("parity", "plant_torch")
def weights_that_creep(network: Any) -> None:
    """Every call moves one weight by its last bit: nothing after a thousand calls, another weight after a hundred million."""
    import torch

    def creep(module: Any, *_: object) -> None:
        one = module.weight.data[:1, :1]
        one.copy_(torch.nextafter(one, one.new_tensor(9.0)))

    next(module for name, module in network.named_modules() if name.endswith("output.dense")).register_forward_hook(creep)


@mutant("parity", "plant_torch")
def ranges_that_move(network: Any) -> None:
    """A range that each call moves by a millionth clips the logits: in a buffer, as a quantiser's that still measures."""
    import torch

    network.register_buffer("range", torch.tensor(20.0))

    def clip(module: Any, inputs: Any, answers: Any) -> Any:
        module.range.mul_(1 - 1e-6)
        return tuple(answer.clamp(-module.range, module.range) for answer in answers)

    network.register_forward_hook(clip)
