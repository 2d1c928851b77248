"""`bertopt.load`: a stage or artefact directory to a Predictor, verified before a byte reaches a loader."""

from __future__ import annotations

from pathlib import Path

from bertopt import stages
from bertopt.core import Device
from bertopt.runtime.predictor import MAX_BATCH_TOKENS, Predictor
from bertopt.sessions import open_session
from bertopt.system import environment


def load(
    directory: str | Path, device: Device | None = None, threads: int | None = None, streams: int | None = None,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
) -> Predictor:  # fmt: skip
    """Open an artefact (or a stage) in this process, on the device it was exported for unless `device` says else.

    `threads` are for all `streams` together; so many batches of a call then run at once, by default as the form can. See `Predictor` for
    `max_batch_tokens`. Raises IntegrityError where a file is not the one exported, Unsupported where this machine cannot run
    it or lacks the instructions that it was measured with, UsageError for several streams where its runtime runs one batch
    at a time.
    """
    path = Path(directory)
    manifest = stages.verify(path)
    device = device or manifest["device"]
    environment.check_isa(manifest, device)
    model = stages.open_stage(path, manifest)
    session = open_session(model, device, threads, streams)
    return Predictor(session, model.spec, path, model.max_shape, max_batch_tokens)
