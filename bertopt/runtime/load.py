"""`bertopt.load`: a stage or artefact directory to a Predictor, verified before a byte reaches a loader."""

from __future__ import annotations

from pathlib import Path

from bertopt import stage
from bertopt.core import Device
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session


def load(directory: str | Path, device: Device | None = None, threads: int | None = None) -> Predictor:
    """Open an artefact (or a stage) in this process, on the device it was exported for unless `device` says else.

    Raises IntegrityError where a file is not the one exported, Unsupported where this machine cannot run it.
    """
    path = Path(directory)
    manifest = stage.verify(path)
    model = stage.open_stage(path, manifest)
    return Predictor(open_session(model, device or manifest["device"], threads), model.spec, path, model.max_shape)
