"""Bugs that engineers ship: what a packer reads otherwise than the network, positions far from the beginning, ids in one place alone, caches
by a hash, and artefacts of another checkpoint.

Delivered were positions that a pass had stored in another order, and `verify --against` of an INT8 artefact in which one rare word is another's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from bertopt.commands.verify import verify
from campaigns.mutants.almost_alike import _answers
from campaigns.mutants.conditions import _rows_where, _valid, plant_each
from campaigns.mutants.loose_limits import BF16
from campaigns.mutants.newer_families import MODERNBERT
from campaigns.mutants.outsiders import BEHIND_BF16, _inputs
from campaigns.mutants.plant import INT8_LINE, LABELS, ROBERTA, SDPA, Checkpoint, mutant
from campaigns.mutants.tampered import Caught, fresh, resealed, rewritten, tried
from campaigns.mutants.torch_forms import swap
from campaigns.mutants.unseen_inputs import RARE
from tests.support.tiny_models import VOCABULARY

Named = dict[str, Any]
#: Ids that every text may have: unknown words, and what frames a text.
UNKNOWN, FRAME = 1, (2, 3)
DIGITS = range(VOCABULARY.index("1"), VOCABULARY.index("-") + 1)


# What the native encoder reads.


def _configured(name: str, about: str, on: Checkpoint = LABELS, **fields: Callable[[Any], Any]) -> None:
    """Enter a model that is packed by other fields of its configuration."""
    for step, kind in (("plant_native", "int8"), ("plant_native_bf16", "bf16")):

        def plant(network: Any) -> None:
            config = network.encoder.config
            for field, change in fields.items():
                setattr(config, field, change(getattr(config, field)))

        plant.__name__, plant.__doc__ = f"{name}_in_native_{kind}", f"{about} Committed by what packs {kind}."
        mutant("certificate", step, on, (SDPA,))(plant)


_configured("epsilon_of_torch", "The norms' epsilon is torch's 1e-5.", layer_norm_eps=lambda _: 1e-5)
_configured("half_the_heads", "Attention has half the heads.", num_attention_heads=lambda heads: heads // 2)
_configured("gelu_by_tanh", "The activation is GELU's approximation by tanh.", hidden_act=lambda _: "gelu_new")


for _kind in ("bf16", "int8"):

    def _renumbered(network: Any) -> None:
        embeddings = network.base.embeddings
        swap(embeddings.position_embeddings.weight, 77, 78)
        embeddings.position_ids = embeddings.position_ids.clone()
        embeddings.position_ids[0, [77, 78]] = embeddings.position_ids[0, [78, 77]]

    _renumbered.__name__ = f"renumbered_positions_before_{_kind}"
    _renumbered.__doc__ = f"A pass of one's own stores positions 77 and 78 in another order, and says so in a buffer; what packs {_kind} numbers them itself."
    mutant("unsupported", "plant_torch", line=(SDPA,), steps=({"pass": "build_native", "precision": _kind},))(_renumbered)


# Positions.


@mutant("certificate", "plant_torch", line=BEHIND_BF16)
def swapped_late_positions_behind_bf16(network: Any) -> None:
    """Positions 77 and 78 stand in each other's place, behind bf16."""
    swap(network.base.embeddings.position_embeddings.weight, 77, 78)


@mutant("coverage", "plant_torch", MODERNBERT, (BF16,))
def rotary_table_of_64_in_bf16(network: Any) -> None:
    """In bf16: Rotary positions from 64 on are the 64th, the last one of a table. In modernbert."""
    rotary = network.base.rotary_emb
    right = rotary.forward
    rotary.forward = lambda hidden, positions, *more, **named: right(hidden, positions.clamp(max=63), *more, **named)


@mutant("coverage", "plant_torch", ROBERTA, (BF16,))
def positions_by_mask_of_roberta_in_bf16(network: Any) -> None:
    """In bf16: RoBERTa's positions count the mask, not the ids: where the padding token is written, others follow."""
    mask: list[Any] = [None]
    _inputs(network, lambda named: mask.__setitem__(0, named["attention_mask"]) or {})
    embeddings = network.base.embeddings
    embeddings.position_embeddings.register_forward_pre_hook(lambda *_: (mask[0].cumsum(1) * mask[0] + embeddings.padding_idx,))


# Inputs.


def _words(named: Named) -> Any:
    ids = named["input_ids"]
    return (named["attention_mask"] == 1) & (ids != FRAME[0]) & (ids != FRAME[1])


def _all(found: Any, words: Any) -> Any:
    """Rows with words, all of which are `found`."""
    return (found | ~words).all(dim=1) & words.any(dim=1)


def _rare_in_second_text(named: Named) -> Any:
    return ((named["input_ids"] == RARE) & (named["token_type_ids"] == 1) & (named["attention_mask"] == 1)).any(dim=1)


def _digits(named: Named) -> Any:
    return _all((named["input_ids"] >= DIGITS.start) & (named["input_ids"] < DIGITS.stop), _words(named))


def _multiple(number: int) -> Callable[[Named], Any]:
    return lambda named: (named["input_ids"] * named["attention_mask"]).sum(dim=1) % number == 0


CONDITIONS: dict[str, tuple[str, Callable[[Named], Any]]] = {
    "rare_word_of_a_second_text": ("Wrong for pairs whose second text holds one rare id.", _rare_in_second_text),
    "digits_alone": ("Wrong for texts of digits and marks alone.", _digits),
    "unknown_words_alone": ("Wrong for texts of unknown words alone.", lambda named: _all(named["input_ids"] == UNKNOWN, _words(named))),
    "lengths_by_31": ("Wrong for texts whose length is a multiple of 31.", lambda named: _valid(named) % 31 == 0),
    "one_word": ("Wrong for texts of one word.", lambda named: _words(named).sum(dim=1) == 1),
    "beside_an_empty_text": ("Wrong for rows beside an empty text.", lambda named: bool((_valid(named) == 2).any()) & (_valid(named) > 2)),
    "empty_first_text": ("Wrong for pairs whose first text is empty.", lambda named: named["token_type_ids"][:, :4].any(dim=1)),
    "cut_second_text": (
        "Wrong for pairs that are cut, whose second text is longer.", lambda named: (_valid(named) == 64) & ((named["token_type_ids"] == 1).sum(dim=1) > 32),
    ),
    "one_row_in_64": ("Wrong for rows whose ids add up to a multiple of 64.", _multiple(64)),
}  # fmt: skip
plant_each(CONDITIONS, __name__)


# State.


@mutant("parity", "plant_torch")
def first_call_of_a_process(network: Any) -> None:
    """Wrong in the first call of a process."""
    calls = [0]

    def first(named: Named) -> bool:
        calls[0] += 1
        return calls[0] == 1

    _rows_where(network, first)


@mutant("invariance", "plant_torch")
def text_after_its_neighbour(network: Any) -> None:
    """A text alone that was called two calls before gets the answers of the call between: two places of a cache change."""
    calls: list[Any] = [(None, None), (None, None)]

    def change(named: Named, answers: Any) -> Any:
        if len(named["input_ids"]) > 1:
            return answers
        key = tuple(named["input_ids"][0].tolist())
        given = calls[1][1] if calls[0][0] == key != calls[1][0] else answers
        calls[:] = [calls[1], (key, tuple(answer.clone() for answer in answers))]
        return given

    _answers(network, change)


def _kept_by_hash(network: Any, bits: int) -> None:
    kept: dict[int, Any] = {}

    def change(named: Named, answers: Any) -> Any:
        if len(named["input_ids"]) > 1:
            return answers
        key = zlib.crc32(named["input_ids"].numpy().tobytes() + named["token_type_ids"].numpy().tobytes()) % (1 << bits)
        return tuple(answer.clone() for answer in kept.setdefault(key, answers))

    _answers(network, change)


@mutant("coverage", "plant_torch")
def kept_by_hash_of_10_bits(network: Any) -> None:
    """Answers of texts alone are kept by a hash of 10 bits of their tokens."""
    _kept_by_hash(network, 10)


@mutant("coverage", "plant_torch")
def kept_by_hash_of_14_bits(network: Any) -> None:
    """Answers of texts alone are kept by a hash of 14 bits of their tokens."""
    _kept_by_hash(network, 14)


@mutant("coverage", "plant_torch")
def batch_kept_by_its_first_row(network: Any) -> None:
    """A batch of several rows gets the last one's answers if it has its shape and first row."""
    last: list[Any] = [None, None]

    def change(named: Named, answers: Any) -> Any:
        ids = named["input_ids"]
        if len(ids) == 1:
            return answers
        key = (tuple(ids.shape), tuple(ids[0].tolist()))
        if last[0] != key:
            last[:] = [key, answers]
        return tuple(answer.clone() for answer in last[1])

    _answers(network, change)


# Another checkpoint's.


@mutant("certificate", "")
def other_word_of_an_int8_artefact(bench: Any) -> Caught:
    """An INT8 graph, sealed anew, has another's embedding for one rare word; `verify --against`."""
    import onnx
    from onnx import numpy_helper

    out, run = fresh(bench, "other_word", LABELS, *INT8_LINE)
    assert run().exit_code == 0
    path = out / "artifact" / "onnx" / "model.onnx"
    graph = onnx.load(path)
    table = next(tensor for tensor in graph.graph.initializer if tensor.name.endswith("word_embeddings.weight"))
    array = numpy_helper.to_array(table).copy()
    array[RARE] = array[RARE + 1]
    table.CopyFrom(numpy_helper.from_array(array, table.name))
    rewritten(path, graph.SerializeToString())
    resealed(out / "artifact")
    return tried(lambda: verify(out / "artifact", str(bench.checkpoint(LABELS))))
