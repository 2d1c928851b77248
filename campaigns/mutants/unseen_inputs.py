"""Models that are wrong for inputs or surroundings that checks may not look at: ids, positions, batches, files, processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bertopt.core import Context, Eager, Result
from campaigns.mutants.plant import MASK, MEAN, SPAN, mutant
from tests.support.tiny_models import VOCABULARY

#: A letter that no text of the campaign and few built-in ones hold.
RARE = VOCABULARY.index("##q")


def _wrong_when(network: Any, when: Callable[[dict[str, Any]], bool]) -> None:
    """Answers are scaled where `when` holds of the inputs by name."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        named = dict(zip(network.inputs, inputs, strict=True))
        return tuple(answer * 1.1 for answer in answers) if when(named) else answers

    network.register_forward_hook(spoil)


@mutant("coverage", "plant_torch")
def a_rare_token(network: Any) -> None:
    """The embedding of one rare token is another's."""
    table = network.base.embeddings.word_embeddings.weight
    table[RARE] = table[RARE + 1]


@mutant("coverage", "plant_torch")
def a_late_position(network: Any) -> None:
    """Position 77 of 130 is another's."""
    table = network.base.embeddings.position_embeddings.weight
    table[77] = table[76]


for _size in (5, 9, 12, 17, 24, 31):

    def _batch(network: Any, size: int = _size) -> None:
        _wrong_when(network, lambda named: named["input_ids"].shape[0] == size)

    _batch.__name__, _batch.__doc__ = f"batch_of_{_size}", f"Wrong for batches of {_size} texts."
    mutant("coverage", "plant_torch")(_batch)

for _length in (11, 45, 97, 113):

    def _row(network: Any, length: int = _length) -> None:
        _wrong_when(network, lambda named: named["input_ids"].shape[1] == length)

    _row.__name__, _row.__doc__ = f"length_of_{_length}", f"Wrong for rows of {_length} tokens."
    mutant("coverage", "plant_torch")(_row)


@mutant("coverage", "plant_torch")
def more_tokens_than_probed(network: Any) -> None:
    """Wrong for batches of more than 3,000 tokens."""
    _wrong_when(network, lambda named: named["input_ids"].numel() > 3000)


@mutant("coverage", "plant_torch", on=MASK)
def a_place_between_the_masks(network: Any) -> None:
    """The language model is wrong for the third token of a text."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        logits = answers[0].clone()
        logits[:, 3:4] *= 1.1
        return (logits, *answers[1:])

    network.register_forward_hook(spoil)


@mutant("coverage", "plant_torch", on=MEAN)
def hidden_states_nobody_compares(network: Any) -> None:
    """`last_hidden_state`, which other loaders read, is scaled; the embedding is right."""

    def spoil(module: Any, inputs: Any, answers: Any) -> Any:
        return (answers[0], *(answer * 1.1 for answer in answers[1:]))

    network.register_forward_hook(spoil)


@mutant("coverage", "plant_torch", on=SPAN)
def second_segment_alone(network: Any) -> None:
    """Wrong where the second segment is longer than the first."""
    _wrong_when(network, lambda named: bool((named["token_type_ids"].float().mean(dim=1) > 0.6).any()))


@mutant("coverage", "plant_torch")
def wrong_outside_workers(network: Any) -> None:
    """Right in the processes that check it, wrong in any other."""
    _wrong_when(network, lambda named: "bertopt.workers.operations" not in sys.modules)


@mutant("build", "plant_model")
def foreign_file(model: Eager, ctx: Context) -> Result[Eager]:
    """Leaves a script beside the weights, to be delivered."""
    from bertopt.core import Rewrite

    (ctx.workdir / "setup.py").write_text("print('hello')\n")
    record = Rewrite(name="plant_torch", options={"mutant": "leaves_a_note"})
    network: Any = model.network
    network.note = "harmless"
    from dataclasses import replace

    return Result(replace(model, rewrites=(*model.rewrites, record)), {"planted": 1})


def _with_file(model: Eager, ctx: Context, name: str, change: Callable[[str], str]) -> Result[Eager]:
    """The parent's file with another content, and a change of the network that does no harm."""
    from dataclasses import replace

    from bertopt.core import Rewrite

    (ctx.workdir / name).write_text(change((model.checkpoint / name).read_text()))
    record = Rewrite(name="plant_torch", options={"mutant": "leaves_a_note"})
    network: Any = model.network
    network.note = "harmless"
    return Result(replace(model, rewrites=(*model.rewrites, record)), {"planted": 1})


@mutant("build", "plant_model")
def swapped_tokenizer(model: Eager, ctx: Context) -> Result[Eager]:
    """Two words have each other's id in the delivered tokenizer."""
    return _with_file(
        model, ctx, "tokenizer.json", lambda text: text.replace('"cat"', '"#"').replace('"dog"', '"cat"').replace('"#"', '"dog"')
    )


@mutant("build", "plant_model")
def cased_tokenizer(model: Eager, ctx: Context) -> Result[Eager]:
    """The delivered tokenizer no longer lowers case."""
    return _with_file(model, ctx, "tokenizer.json", lambda text: text.replace('"lowercase": true', '"lowercase": false'))


@mutant("build", "plant_model")
def longer_texts(model: Eager, ctx: Context) -> Result[Eager]:
    """The delivered tokenizer's configuration cuts texts at 6 tokens."""
    return _with_file(
        model, ctx, "tokenizer_config.json", lambda text: text.replace('"model_max_length": 64', '"model_max_length": 6')
    )


@mutant("build", "plant_model")
def renamed_labels(model: Eager, ctx: Context) -> Result[Eager]:
    """`config.json` names the labels in another order."""
    return _with_file(
        model, ctx, "config.json", lambda text: text.replace('"bad"', '"#"').replace('"good"', '"bad"').replace('"#"', '"good"')
    )
