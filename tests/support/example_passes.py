"""Passes that misbehave in every way a recipe must survive. Workers import this module by its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from bertopt.core import Context, Eager, Pass, Result
from bertopt.errors import Unsupported
from bertopt.passes import register
from bertopt.pipeline.race import Budget


def make_timing_cheap(patch: pytest.MonkeyPatch) -> None:
    """Timing that proves nothing and takes no time."""
    patch.setattr("bertopt.checks.latency.TURN_MS", 1.0)
    cheap = Budget(0.0, 0.0, min_rounds=3)
    patch.setattr(Budget, "of", lambda _: cheap)
    patch.setattr("bertopt.pipeline.pair.Budget", lambda: cheap)


def make_cheap(patch: pytest.MonkeyPatch) -> None:
    """Cheap timing, few texts, and one thread a worker: more only get in each other's way. Where there are more, they do not spin."""
    make_timing_cheap(patch)
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    patch.setattr(
        "bertopt.checks.probes.built_in_texts", lambda: ["", "a", "the cat sat on the mat", "狗 坐 着", "cat " * 99]
    )


class Touch(Pass[Eager, Eager]):
    """Changes nothing that matters: adds `amount` to a mark that it leaves on the network, and counts it."""

    amount: int = 1

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        network.touched = getattr(network, "touched", 0) + self.amount
        return {"touched": self.amount}


class ReturnInput(Pass[Eager, Eager]):
    """Gives back its very input, and claims a change."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return Result(model, {"claimed": 3})


class SwapLabels(Touch):
    """Answers the first label where it means the second."""

    def rewrite(self, network: Any) -> dict[str, int]:
        classifier = network.encoder.classifier
        for tensor in (classifier.weight, classifier.bias):
            tensor[[0, 1]] = tensor[[1, 0]].clone()
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


class LastWords(Touch):
    """Says something, and then crashes, is killed as if for memory, or never ends."""

    how: Literal["SIGSEGV", "SIGKILL", "hang"]

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        os.write(2, b"my last words\n")
        if self.how != "hang":
            os.kill(os.getpid(), getattr(signal, self.how))
        time.sleep(1000)
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


def _wait(pids: str) -> None:
    """Note this process's id in the directory `pids`, then do nothing for ever."""
    Path(pids, str(os.getpid())).touch()
    while True:
        time.sleep(1)


def _fork(pids: str, *before: Any) -> None:
    """A child that first calls `before`, then waits."""
    if os.fork() == 0:
        for call in before:
            call()
        _wait(pids)


def _deaf() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)


class Family(Touch):
    """Starts processes that try to get away, noting their ids in the directory `pids`, and ends as `end` says."""

    pids: str
    child: Literal["none", "plain", "setsid", "daemon", "deaf", "stopped"] = "none"
    end: Literal["hang", "deaf", "stop", "exit", "return", "SIGSEGV", "SIGKILL"] = "hang"

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        before = {"setsid": [os.setsid], "deaf": [os.setsid, _deaf]}.get(self.child, [])
        grandchildren = [lambda: _fork(self.pids)]
        if self.child == "daemon":
            # Forked twice, and the one between is gone: nobody's child, in a session of its own.
            if os.fork() == 0:
                os.setsid()
                _fork(self.pids, lambda: _fork(self.pids))
                os._exit(0)
            os.wait()
        elif self.child != "none":
            _fork(self.pids, *before, *grandchildren)
        expected = 1 if self.child == "none" else 3
        Path(self.pids, str(os.getpid())).touch()
        while len(os.listdir(self.pids)) < expected:
            time.sleep(0.01)
        if self.child == "stopped":
            for name in os.listdir(self.pids):
                if int(name) != os.getpid():
                    os.kill(int(name), signal.SIGSTOP)
        if self.end == "return":
            return super().__call__(model, ctx)
        if self.end == "exit":
            os._exit(3)
        if self.end == "deaf":
            _deaf()
        elif self.end == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.end != "hang":
            os.kill(os.getpid(), getattr(signal, self.end))
        while True:
            time.sleep(1)


def _timed() -> bool:
    """Whether the clock runs: no model may know, these do."""
    frame: Any = sys._getframe()
    while frame and frame.f_code.co_name != "time_steps":
        frame = frame.f_back
    return frame is not None


class FailWhenTimed(Touch):
    """Answers well, but dies or hangs when it is timed."""

    how: Literal["die", "hang"] = "die"

    def rewrite(self, network: Any) -> dict[str, int]:
        def look(*_: Any) -> None:
            if _timed():
                if self.how == "die":
                    os.kill(os.getpid(), signal.SIGSEGV)
                time.sleep(1000)

        network.register_forward_pre_hook(look)
        return {"hooks": 1}


class StaleWhenTimed(Touch):
    """Answers as it did before to a batch of the same shape when it is timed."""

    def rewrite(self, network: Any) -> dict[str, int]:
        run = network.forward
        known: dict[Any, Any] = {}

        def forward(*inputs: Any) -> Any:
            shape = inputs[0].shape
            if not (_timed() and shape in known):
                known[shape] = run(*inputs)
            return known[shape]

        network.forward = forward
        return {"networks": 1}


class AnswerLate(Touch):
    """Answers before it has done the work, as a session does that does not wait for its device."""

    def rewrite(self, network: Any) -> dict[str, int]:
        run = network.forward

        class Promise:
            def __init__(self, inputs: tuple[Any, ...], number: int) -> None:
                self.inputs, self.number, self.known = inputs, number, None

            def float(self) -> Any:
                if self.known is None:
                    time.sleep(0.02)
                    self.known = run(*self.inputs)[self.number].detach()
                return self.known

        network.forward = lambda *inputs: (Promise(inputs, 0),)
        return {"networks": 1}


for _pass in (
    Touch, ReturnInput, SwapLabels, NeverHere, RaiseError, FillDisk, KillItself, LastWords, Hang, Family, FailWhenTimed,
    StaleWhenTimed, AnswerLate,
):  # fmt: skip
    register(_pass)
