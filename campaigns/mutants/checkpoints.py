"""The tiny checkpoints that mutants are planted in: as trained ones, they have biases and 130 positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from campaigns.mutants.plant import Checkpoint
from tests.support.tiny_models import write_tiny

POSITIONS = 130


def write(out: Path, of: Checkpoint = Checkpoint(), seed: int = 0) -> Path:  # noqa: B008  (frozen)
    """Write the checkpoint directory; returns it."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    write_tiny(out, of.family, of.task, of.pooling, seed)
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
    config["max_position_embeddings"] = POSITIONS
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return out
