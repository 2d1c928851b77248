"""Let checks run on texts that the model's tokenizer knows."""

from __future__ import annotations

from pathlib import Path

from bertopt.recipe.texts import Texts
from bertopt.workers.client import Worker
from bertopt.workers.remote_tokenizer import BATCH_S

#: What a report says of it.
OWN_WORDS = (
    "the tokenizer does not know most words of the built-in texts: models are checked, calibrated and timed on random sequences of "
    "tokens from its vocabulary instead; give inputs.texts for real ones"
)


def fitting(worker: Worker, directory: Path, texts: Texts) -> Texts:
    """Return `texts` with the built-in ones replaced where the tokenizer of the stage in `directory` knows few of their words."""
    return texts.for_tokenizer(worker.call("own_texts", timeout=BATCH_S, directory=str(directory)))
