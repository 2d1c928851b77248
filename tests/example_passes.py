"""Passes that misbehave in every way a recipe must survive. Workers import this module by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from bertopt.core import Context, Eager, Pass, Result
from bertopt.errors import Unsupported
from bertopt.passes import register


def make_cheap(patch: pytest.MonkeyPatch) -> None:
    """Timing that proves nothing and takes no time, and one thread a worker: more only get in each other's way."""
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setattr("bertopt.checks.latency.MIN_ROUNDS", 3)
    patch.setattr("bertopt.checks.latency.TURN_MS", 1.0)
    patch.setattr("bertopt.examine.SHAPE_BUDGET_S", 0.0)
    patch.setattr("bertopt.examine.MIX_BUDGET_S", 0.0)
    patch.setattr(
        "bertopt.checks.probes.built_in_texts", lambda: ["", "a", "the cat sat on the mat", "狗 坐 着", "cat " * 99]
    )


class Touch(Pass[Eager, Eager]):
    """Changes nothing that matters, and counts `amount`."""

    amount: int = 1

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        return {"touched": self.amount}


class ReturnInput(Pass[Eager, Eager]):
    """Gives back its very input, and claims a change."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return Result(model, {"claimed": 3})


class SwapLabels(Touch):
    """Answers the first label where it means the second."""

    def rewrite(self, network: Any) -> dict[str, int]:
        weight = network.encoder.classifier.weight
        weight[[0, 1]] = weight[[1, 0]].clone()
        return {"rows": 2}


class NeverHere(Touch):
    """Needs a machine that nobody has."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        raise Unsupported("this needs a quantum computer; buy one")


class RaiseError(Touch):
    """Has a bug."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        raise ValueError("a bug in the pass")


class FillDisk(Touch):
    """Finds no room on the disk."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        raise OSError(28, "No space left on device", str(ctx.workdir / "model.onnx"))


class KillItself(Touch):
    """Crashes the process, as a bad kernel or the out-of-memory killer does."""

    how: Literal["SIGSEGV", "SIGKILL"] = "SIGSEGV"

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        os.kill(os.getpid(), getattr(signal, self.how))
        raise AssertionError("still alive")


class Hang(Touch):
    """Starts a process, writes its own and the process's id to the file `pids`, and never ends."""

    pids: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        (ctx.workdir / "half-done").write_text("…")
        child = subprocess.Popen(["sleep", "1000"])
        part = Path(self.pids + ".part")
        part.write_text(f"{os.getpid()} {child.pid}")
        part.rename(self.pids)
        while True:
            time.sleep(1)


class FailWhenTimed(Touch):
    """Answers well, but dies or hangs when the same input comes twice, as it does when it is timed."""

    how: Literal["die", "hang"] = "die"

    def rewrite(self, network: Any) -> dict[str, int]:
        seen: list[Any] = []

        def look(_: Any, inputs: tuple[Any, ...]) -> None:
            if seen and seen[-1] is inputs[0]:
                if self.how == "die":
                    os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(1000)
            seen[:] = inputs[:1]

        network.register_forward_pre_hook(look)
        return {"hooks": 1}


for _pass in (Touch, ReturnInput, SwapLabels, NeverHere, RaiseError, FillDisk, KillItself, Hang, FailWhenTimed):
    register(_pass)
