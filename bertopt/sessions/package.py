"""Networks that torch compiled ahead of time: no compiler and no transformers where they run."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator
from typing import Any

import torch

from bertopt.core import Packaged, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.sessions.torch import TorchSession
from bertopt.system import environment, gpu

_REBUILD = "build it here: bertopt export RECIPE, with the recipe in manifest.json"


class PackageSession(TorchSession):
    """A package is native code: the caller has checked its hash, and it is opened only on the kind of machine it is for."""

    def _open(self, model: Packaged) -> Any:
        if reason := misfit(model, self.device.type):
            raise Unsupported(f"{reason}; {_REBUILD}")
        # A session on a GPU has its threads take turns, and two batches in flight: with the container's own locks the host waited,
        # Python's lock held, until the first had been run before it queued the second.
        alone = self.device.type == "cuda"
        try:
            with _without_advice():
                return torch._inductor.aoti_load_package(str(model.path), run_single_threaded=alone)
        except (RuntimeError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise Unsupported(f"torch {torch.__version__} cannot open the package ({first}); {_REBUILD}") from error

    def facts(self) -> RuntimeFacts:
        return super().facts().model_copy(update={"graphs": None, "runtime": f"torch {torch.__version__}, compiled ahead"})


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Where there is no compiler, which torch runs to learn the CPU's instructions, it calls a package outdated and opens it all the same."""
    logger = logging.getLogger("torch._inductor.package.package")

    def wanted(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Loading outdated pt2 file")

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def misfit(model: Packaged, device: str) -> str | None:
    """Return why the package cannot run on `device` of this machine, or None."""
    built = model.built
    if built.device != device:
        return f"the package is for device: {built.device}; got {device}"
    if built.torch != torch.__version__:
        return f"the package needs torch {built.torch}, which compiled it; got {torch.__version__}"
    if built.machine != platform.machine():
        return f"the package is for {built.machine}; this machine is {platform.machine()}"
    if device == "cuda":
        here = gpu.capability()
        return None if here == built.capability else f"the package is for {built.capability}; this GPU is {here}"
    missing = sorted({*built.instructions} - {*environment.instructions()})
    return f"the package may use {', '.join(missing)}, which this CPU lacks" if missing else None
