"""The attention of one text in the eager fp32 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertopt.core import Eager
from bertopt.errors import Unsupported
from bertopt.report.profile import Attention
from bertopt.runtime.tokenization import Tokenizer

#: Tokens of the text that are shown at most.
MOST_TOKENS = 48


def attention(model: Eager, directory: Path, text: str) -> Attention:
    """Return attention probabilities, the mean over heads, of each layer for at most MOST_TOKENS tokens of `text`.

    Raises Unsupported for a family whose layers do not return them.
    """
    import torch

    tokenizer = Tokenizer(directory, model.spec, min(MOST_TOKENS, model.spec.max_length))
    pair = model.spec.task == "question-answering"
    inputs = tokenizer.batch(tokenizer.encode([("", text) if pair else text]))
    network: Any = model.network
    with torch.inference_mode():
        out = network.encoder(**{name: torch.from_numpy(array) for name, array in inputs.items()}, output_attentions=True)
    layers = [layer for layer in out.attentions or () if layer is not None]
    if len(layers) != model.spec.layers:
        raise Unsupported(f"'{model.spec.family}' gave attention for {len(layers)} of {model.spec.layers} layers; leave --attention out")
    tokens = [tokenizer.fast.id_to_token(int(number)) or "" for number in inputs["input_ids"][0]]
    means = [[[round(float(x), 4) for x in row] for row in layer[0].float().mean(0).tolist()] for layer in layers]
    return Attention(text=text, tokens=tokens, layers=means)
