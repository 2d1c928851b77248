"""The tiny checkpoints that mutants are planted in: as trained ones, they have biases and 130 positions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from campaigns.mutants.plant import Checkpoint
from tests.support.proteins import write_protein
from tests.support.tiny_models import write_tiny

POSITIONS = 130
TAGS = ("O", *(f"{place}-{kind}" for kind in ("PER", "LOC", "ORG", "MISC") for place in "BI"))
TOPICS, INTENTS = 28, 77
#: What the configuration of each head says besides, and what its outputs are multiplied by and added to: two numbers of a text far apart in
#: size, one score of a pair, tokens of which most are outside of all entities, several labels of a text of which most are rare, one label of
#: many, scores of which most are low.
HEADS: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "numbers": ({"num_labels": 2, "problem_type": "regression"}, [1.0, 2e4], [3.0, 1e5]),
    "ranker": ({"num_labels": 1}, [2.0], [0.0]),
    "low": ({"num_labels": 1}, [3.0], [-8.0]),
    "topics": (
        {"num_labels": TOPICS, "problem_type": "multi_label_classification"}, [10.0] * 8 + [3.0] * 12 + [1.0] * 8, [-2.0] * 8 + [-5.0] * 12 + [0.0] * 8,
    ),
    "intents": ({"num_labels": INTENTS}, [6.0], [0.0]),
    "entities": ({"num_labels": len(TAGS), "id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}, [1.0], [3.0] + [0.0] * 8),
}  # fmt: skip


def write(out: Path, of: Checkpoint = Checkpoint(), seed: int = 0) -> Path:  # noqa: B008  (frozen)
    """Write the checkpoint directory; returns it."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    fields, sizes, shifts = HEADS.get(of.head, ({}, [1.0], [0.0]))
    write = write_protein if of.family == "esm" else functools.partial(write_tiny, family=of.family)
    write(out, task=of.task, pooling=of.pooling, seed=seed, extra=fields)
    config = json.loads((out / "config.json").read_text())
    weights: dict[str, Any] = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(weights.items()):
        if tensor.dim() == 1:
            # Biases start at 0 and LayerNorms at 1: no fault in them would show.
            weights[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        elif name.endswith("position_embeddings.weight"):
            more = POSITIONS - config["max_position_embeddings"]
            extra = torch.randn((more, tensor.shape[1]), generator=generator) * tensor.std()
            weights[name] = torch.cat([tensor, extra])
    if of.head:
        by = torch.tensor(sizes)
        last = "classifier" if "classifier.weight" in weights else "classifier.out_proj"
        weights[f"{last}.weight"] = weights[f"{last}.weight"] * by[:, None]
        weights[f"{last}.bias"] = weights[f"{last}.bias"] * by + torch.tensor(shifts)
    if of.family == "deberta" and config["max_relative_positions"] < 1:
        # Its table of distances would have to grow as well.
        config["max_relative_positions"] = config["max_position_embeddings"]
    # RoFormer's table holds sines, which transformers makes anew.
    weights.pop("roformer.encoder.embed_positions.weight", None)
    config["max_position_embeddings"] = POSITIONS
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out
