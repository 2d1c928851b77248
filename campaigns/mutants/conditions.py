"""Models that are wrong on one condition alone, of kinds that the other tables lack, planted in every precision.

Not planted is what no check runs: a fault of one pair of ids, of one batch size at one length, of one user or date, or after more
calls than a run makes; and calls that overlap, as the predictor takes turns where a session is not `concurrent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bertopt.core import Context, Eager, Onnx, Result, Rewrite
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.plant import INT8_LINE, LABELS, MEAN, ONNX_LINE, SDPA, Checkpoint, Step, behind, mutant
from campaigns.mutants.unseen_inputs import RARE

Named = dict[str, Any]


def _rows_where(network: Any, wrong: Callable[[Named], Any]) -> None:
    """Logits of the rows that `wrong` gives as a mask [B], or all where it gives True, are another label's."""
    import torch

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        found = torch.as_tensor(wrong(dict(zip(network.inputs, inputs, strict=True)))).reshape(-1, 1)
        return (torch.where(found, answers[0].roll(1, dims=-1), answers[0]), *answers[1:])

    network.register_forward_hook(spoil)


def _token_twice(named: Named) -> Any:
    ordered = named["input_ids"].masked_fill(named["attention_mask"] == 0, -1).sort(dim=1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)).any(dim=1)


def _same_row_before(named: Named) -> Any:
    ids = named["input_ids"]
    return (ids[:, None] == ids[None]).all(dim=2).tril(-1).any(dim=1)


def _valid(named: Named) -> Any:
    return named["attention_mask"].sum(dim=1)


def _rows(named: Named) -> Any:
    import torch

    return torch.arange(named["input_ids"].shape[0])


def _token(named: Named, number: int) -> Any:
    return ((named["input_ids"] == number) & (named["attention_mask"] == 1)).any(dim=1)


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "token_twice": ("Wrong for texts that hold a token twice.", _token_twice),
    "long_second_half": ("Wrong for pairs whose second half has more than 20 tokens.", lambda named: (named["token_type_ids"] == 1).sum(dim=1) > 20),
    "row_17_on": ("Wrong from row 17 of a batch on.", lambda named: _rows(named) >= 17),
    "last_of_31": ("Wrong for row 30 of a batch.", lambda named: _rows(named) == 30),
    "same_row_before": ("Wrong for a row that stands in its batch before.", _same_row_before),
    "row_of_45": ("Wrong for rows of 45 tokens.", lambda named: named["input_ids"].shape[1] == 45),
    "text_of_45": ("Wrong for texts of 45 tokens, whatever their padding.", lambda named: _valid(named) == 45),
    "row_of_97": ("Wrong for rows of 97 tokens.", lambda named: named["input_ids"].shape[1] == 97),
    "batch_of_nine": ("Wrong for batches of 9.", lambda named: named["input_ids"].shape[0] == 9),
    "one_id": ("Wrong for rows that hold one rare id.", lambda named: _token(named, RARE)),
    "written_padding": ("Wrong for texts in which the padding token is written.", lambda named: _token(named, 0)),
    "longest_not_first": ("Wrong for batches whose first row is not the longest.", lambda named: bool((_valid(named)[0] < _valid(named)).any())),
}  # fmt: skip
LINES: dict[str, tuple[Step, ...]] = {"float32": (SDPA,), "bf16": (SDPA, BF16)}


def plant_each(conditions: Mapping[str, tuple[str, Callable[[Named], Any]]], module: str) -> None:
    """Enter models of `module` that are wrong for the rows that meet a condition, in float32 and in bf16."""
    for name, (about, condition) in conditions.items():
        for precision, line in LINES.items():

            def plant(network: Any, wrong: Callable[[Named], Any] = condition) -> None:
                _rows_where(network, wrong)

            plant.__name__, plant.__doc__, plant.__module__ = f"{name}_in_{precision}", f"In {precision}: {about}", module
            mutant("coverage", "plant_torch", line=line)(plant)


plant_each(CONDITIONS, __name__)


def _calls(network: Any, most: int) -> None:
    seen = [0]

    def late(named: Named) -> bool:
        seen[0] += 1
        return seen[0] > most

    _rows_where(network, late)


@mutant("timed", "plant_torch")
def after_100_calls(network: Any) -> None:
    """Wrong from the 100th call of a process on."""
    _calls(network, 100)


@mutant("parity", "plant_torch")
def in_several_threads(network: Any) -> None:
    """Wrong where a process may use more than one thread."""
    import torch

    _rows_where(network, lambda named: torch.get_num_threads() > 1)


@mutant("parity", "plant_torch")
def left_in_the_buffer(network: Any) -> None:
    """A shorter row after a longer one is wrong: what the longer one left is read."""
    before = [0]

    def shorter(named: Named) -> bool:
        last, before[0] = before[0], named["input_ids"].shape[1]
        return before[0] < last

    _rows_where(network, shorter)


def _outputs(network: Any, change: Callable[[Any], Any]) -> None:
    network.register_forward_hook(lambda module, inputs, answers: tuple(change(answer) for answer in answers))


@mutant("parity", "plant_torch")
def one_dimension_more(network: Any) -> None:
    """Logits are right, and of shape [B, 1, C]."""
    _outputs(network, lambda answer: answer.unsqueeze(1))


@mutant("parity", "plant_torch")
def one_label_more(network: Any) -> None:
    """Logits have one label more, which is never chosen."""
    import torch

    _outputs(network, lambda answer: torch.cat([answer, answer[:, :1] - 100], dim=1))


@mutant("parity", "plant_torch")
def whole_numbers(network: Any) -> None:
    """Logits come as integers."""
    import torch

    _outputs(network, lambda answer: answer.round().to(torch.int64))


def _file(name: str, on: Checkpoint, change: Callable[[str], str] | None) -> Callable[..., Any]:
    """Plant a file of the checkpoint with another content, or none where `change` is None."""

    def plant(model: Eager, ctx: Context) -> Result[Eager]:
        path = ctx.workdir / name
        path.parent.mkdir(exist_ok=True, parents=True)
        before = (model.checkpoint / name).read_text()
        after = "" if change is None else change(before)
        assert after != before, f"{name} must hold what is changed"
        path.write_text(after)
        network: Any = model.network
        network.note = "harmless"
        record = Rewrite(name="plant_torch", options={"mutant": "leaves_a_note"})
        return Result(replace(model, rewrites=(*model.rewrites, record)), {"planted": 1})

    return plant


for _file_name, _on, _what, _change in (
    ("tokenizer_config.json", LABELS, "empty", None),
    ("1_Pooling/config.json", MEAN, "first_token", lambda text: text.replace('"mean"', '"cls"')),
    ("modules.json", MEAN, "empty", None),
):  # fmt: skip
    _planted = _file(_file_name, _on, _change)
    _planted.__name__ = f"{_what}_{_file_name.replace('.', '_').replace('/', '_').lower()}"
    _planted.__doc__ = f"Delivers {_file_name} with another content: {_what.replace('_', ' ')}."
    mutant("build", "plant_model", on=_on)(_planted)


def _graph_where(model: Onnx, ctx: Context, axis: int, size: int) -> Result[Onnx]:
    """The graph gives another label's logits where the inputs' `axis` has `size`."""
    from onnx import helper

    def nodes(output: str) -> list[Any]:
        return [
            helper.make_node("Shape", ["input_ids"], ["planted_shape"]),
            helper.make_node("Gather", ["planted_shape", "planted_axis"], ["planted_found"]),
            helper.make_node("Equal", ["planted_found", "planted_size"], ["planted_when"]),
            helper.make_node("Gather", ["right", "planted_order"], ["planted_wrong"], axis=1),
            helper.make_node("Where", ["planted_when", "planted_wrong", "right"], [output]),
        ]

    constants = {"planted_axis": np.int64(axis), "planted_size": np.int64(size), "planted_order": np.array([2, 0, 1])}
    return behind(model, ctx, nodes, constants)


for _kind, _graph_line in (("onnx", ONNX_LINE), ("int8", INT8_LINE)):
    for _named, _axis, _size in (("rows_of_45", 1, 45), ("rows_of_97", 1, 97), ("batches_of_9", 0, 9)):

        def _conditional(model: Onnx, ctx: Context, axis: int = _axis, size: int = _size) -> Result[Onnx]:
            return _graph_where(model, ctx, axis, size)

        _conditional.__name__ = f"{_named}_in_{_kind}"
        _conditional.__doc__ = f"The {_kind} graph is wrong for {_named.replace('_', ' ')}."
        mutant("coverage", "plant_graph", line=_graph_line)(_conditional)
