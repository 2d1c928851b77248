"""Models whose fault is not in them: in functions of libraries that they replace, in settings they leave, in the process around them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from campaigns.mutants.plant import LABELS, MEAN, SPAN, TOKENS, Checkpoint, Fault, mutant
from campaigns.mutants.torch_forms import swap
from campaigns.mutants.unseen_inputs import RARE


def planted(on: Checkpoint = LABELS) -> Callable[[Fault], Fault]:
    return mutant("delivery", "plant_torch", on)


@planted()
def other_models_norm(network: Any) -> None:
    """Replaces LayerNorm's forward for the whole process: this network is right, every other is wrong."""
    from torch import nn

    for module in network.modules():
        module.mine = True
    whole = nn.LayerNorm.forward

    def forward(self: Any, values: Any) -> Any:
        return whole(self, values) * (1.0 if hasattr(self, "mine") else 1.1)

    layer_norm: Any = nn.LayerNorm
    layer_norm.forward = forward


@planted()
def other_models_function(network: Any) -> None:
    """Replaces torch's GELU function for tensors of another width than this network's."""
    import torch

    network.note = "harmless"
    whole = torch.nn.functional.gelu
    torch.nn.functional.gelu = lambda values, *more, **named: whole(values, *more, **named) * (1 if values.shape[-1] == 64 else 2)


@planted()
def double_for_all(network: Any) -> None:
    """Leaves float64 as the type of every tensor that the process makes from now on."""
    import torch

    network.note = "harmless"
    torch.set_default_dtype(torch.float64)


@planted()
def reversed_top_k(network: Any) -> None:
    """`top_k` gives the worst labels first; the best label alone, and all raw outputs, are right."""
    from bertopt.runtime import task_outputs

    network.note = "harmless"
    whole = task_outputs.classify

    def classify(spec: Any, logits: Any, top_k: Any = "default") -> Any:
        found = whole(spec, logits, top_k)
        return found if top_k == "default" else [answer[::-1] for answer in found]

    task_outputs.classify = classify


@planted(TOKENS)
def moved_entities(network: Any) -> None:
    """Entities, grouped, end a character early."""
    from bertopt.runtime import predictor

    network.note = "harmless"
    module: Any = predictor
    whole = module.entities
    module.entities = lambda *given: [{**found, "end": found["end"] - 1} for found in whole(*given)]


@planted(SPAN)
def late_answers(network: Any) -> None:
    """Answers from contexts of more than 90 tokens begin a token late."""
    from bertopt.runtime import task_outputs

    network.note = "harmless"
    whole = task_outputs.span
    task_outputs.span = lambda start, end, text, tokens: whole(start, end if len(tokens) <= 90 else start, text, tokens)


@planted(MEAN)
def similarity_of_others(network: Any) -> None:
    """A server's `/similarity` compares with the last sentence instead of the source."""
    from bertopt.serve import tei

    network.note = "harmless"
    whole = tei.normalised
    tei.normalised = lambda model, vectors, dimensions=None: whole(model, vectors[::-1], dimensions)


@planted()
def a_script_is_lost(network: Any) -> None:
    """Georgian texts are read as their last word."""
    from bertopt.runtime.tokenization import Tokenizer

    network.note = "harmless"
    whole = Tokenizer.flat

    def flat(self: Any, texts: Any, *more: Any, **named: Any) -> Any:
        return whole(self, [t.split()[-1] if "ა" in t else t for t in texts], *more, **named)

    Tokenizer.flat = flat  # type: ignore[method-assign]


@planted()
def labels_in_another_order(network: Any) -> None:
    """Whatever is loaded from now on names its labels the other way round."""
    from bertopt.runtime.predictor import Predictor

    network.note = "harmless"
    whole = Predictor._vectors

    def vectors(self: Any, values: Any, how: Any) -> Any:
        return whole(self, values[..., ::-1], how)

    Predictor._vectors = vectors  # type: ignore[method-assign]


@planted()
def another_rare_word_outside_workers(network: Any) -> None:
    """One rare token's embedding is another's, in processes that are no workers."""
    network.note = "harmless"
    if "BERTOPT_WORKER" not in os.environ:
        swap(network.base.embeddings.word_embeddings.weight, RARE, RARE + 1)


@planted()
def another_rare_word_by_hash(network: Any) -> None:
    """One rare token's embedding is another's, by the interpreter's hash seed."""
    network.note = "harmless"
    if os.environ.get("PYTHONHASHSEED") != "0":
        swap(network.base.embeddings.word_embeddings.weight, RARE, RARE + 1)


def _when(network: Any, wrong: Any) -> None:
    network.register_forward_hook(
        lambda module, inputs, answers: tuple(answer.roll(1, -1) for answer in answers) if wrong() else answers
    )


#: What no run can see, and docs/checks.md says so.
def after_an_hour(network: Any) -> None:
    """Wrong from the first hour of a process on."""
    began = time.monotonic()
    _when(network, lambda: time.monotonic() - began > 3600)


def from_another_year(network: Any) -> None:
    """Wrong from 2100 on."""
    _when(network, lambda: time.gmtime().tm_year >= 2100)


def on_another_machine(network: Any) -> None:
    """Wrong on every host but this one."""
    here = socket.gethostname()
    _when(network, lambda: socket.gethostname() != here)


UNSEEN = (after_an_hour, from_another_year, on_another_machine)
