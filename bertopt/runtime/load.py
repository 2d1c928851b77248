"""`bertopt.load`: verify a stage or artefact directory and open it as a Predictor."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

from bertopt import stages
from bertopt.core import Device
from bertopt.errors import IntegrityError, UsageError
from bertopt.runtime import replay
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from bertopt.stages.opening import opening
from bertopt.system import environment, forks, sub_interpreters
from bertopt.system.untrusted import reading

#: Forms that run in torch.
TORCH_FORMS = ("eager", "compiled", "packaged")
#: More threads than this are a mistake on any machine, and runtimes take minutes to start them.
MAX_THREADS = 1024
#: By process id: a fork that begins while another thread loads would wait for ever for that thread's lock.
_turns: dict[int, AbstractContextManager[Any]] = {}


def load(
    directory: str | Path, device: Device | None = None, threads: int | None = None, streams: int | None = None,
    max_batch_tokens: int | None = None, key: str | Path | None = None, check: bool = False,
) -> Predictor:  # fmt: skip
    """Open an artefact (or a stage) in this process, on `device` or by default the one it was exported for.

    A call runs as many batches at once as there are `streams` (by default as many as the runtime supports), which share the `threads`. See
    `Predictor` for `max_batch_tokens`. With `key`, the file of a public key, the artefact must be signed with that key (`bertopt sign`).
    With `check`, it must give the outputs for a few fixed texts that it gave when it was exported.

    Every file's hash is verified before it is loaded. Raises IntegrityError where a file was changed or the signature is missing or wrong,
    WrongAnswer where `check` fails, Unsupported where this machine cannot run the artefact or lacks the CPU instructions that it was
    measured with, UsageError for invalid arguments, such as several streams where the runtime runs one batch at a time. Programs that fork
    must load after the fork; an artefact that runs in torch raises UsageError in a fork of a process that has run torch.
    """
    _check_count("threads", threads)
    _check_count("streams", streams)
    _check_count("max_batch_tokens", max_batch_tokens, None)
    if device not in (None, *get_args(Device)):
        raise UsageError(f"device must be one of {', '.join(get_args(Device))}, or None for the one it was exported for; got {device!r}")
    if threads is not None and streams is not None and streams > threads:
        raise UsageError(f"streams share the threads; got {streams} streams for {threads} threads: give at most as many")
    sub_interpreters.refuse()
    path = Path(directory)
    with opening(path, Path(key) if key is not None else None) as opened:
        manifest = opened.manifest
        device = device or manifest.device
        environment.check_isa(manifest.form, manifest.precision, manifest.environment["isa"], device)
        runs_in_torch = manifest.form in TORCH_FORMS
        if runs_in_torch:
            forks.refuse_torch(f"'{path}'")
        origin = f"{manifest.form} {manifest.precision} on {device}, '{path}'"
        with _turn(), reading(f"'{path}'", "export it again"):
            model = stages.open_stage(opened.path, manifest)
            session = open_session(model, device, threads, streams)
            predictor = Predictor(session, model.spec, opened.path, model.shapes, max_batch_tokens, origin=origin)
        opened.keep_for(predictor)
    forks.keep(predictor, _torch_threads() if runs_in_torch else 0)
    if check and manifest.answers is None and manifest.sources is not None and (manifest.gates or {}).get("status") == "ok":
        # Artefacts that were delivered unverified, or by early versions, which recorded neither, have no answers.
        raise IntegrityError(f"'{path}' must record its answers, which are to be checked; its manifest has none: export again")
    if check and manifest.answers is not None:
        replay.check(replay.answers(predictor, manifest.form == "compiled"), manifest.answers, manifest.precision, f"'{path}'")
    return predictor


def _turn() -> AbstractContextManager[Any]:
    """Return the lock of those that import libraries and open models: several threads cannot import transformers or OpenVINO at once."""
    return _turns.setdefault(os.getpid(), threading.RLock())


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _check_count(name: str, value: object, most: int | None = MAX_THREADS) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        raise UsageError(f"{name} must be a whole number from 1{'' if most is None else f' to {most}'}; got {value!r}")
