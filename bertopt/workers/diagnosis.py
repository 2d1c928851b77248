"""Find out why a worker, or the server that starts workers, ended, and make the error that its caller gets."""

from __future__ import annotations

import signal
from pathlib import Path

from bertopt.errors import BertoptError, ResourceError, StepTimeout, WorkerCrashed
from bertopt.system import environment, limits, out_of_memory, out_of_threads

LOG_TAIL = 30
#: First line of faulthandler's stack trace after a fatal signal, and how many lines before it are kept: libraries print their reasons there.
_FATAL, _BEFORE = "Fatal Python error: ", 10
#: What to do about CPU time that ran out.
_OF_CPU_TIME = "; raise the limit (ulimit -t): finished stages are kept"


def server_ended(code: int, log: str) -> BertoptError:
    """Return the error of a server that ended with this exit code (negative for a signal), having written `log`."""
    if code == -signal.SIGXCPU:
        return ResourceError(f"the server of the workers used up its CPU time{_OF_CPU_TIME}")
    if code == -signal.SIGKILL:
        why = f"the server of the workers was killed by SIGKILL, as the kernel does when memory{_or_cpu_time()} runs out"
        return ResourceError(f"{why}; {_more_memory()}, or run elsewhere: finished stages are kept")
    last = (log.strip().splitlines() or [f"exit code {code}"])[-1]
    kind, _, said = last.partition(": ")
    if kind in ("ImportError", "OSError", "ValueError") and (unusable := environment.unusable_library(said)):
        return unusable
    if out_of_threads.said(log):
        return ResourceError(f"the server of the workers ended: {out_of_threads.REMEDY}", log)
    if out_of_memory.said(log) or _limited():
        return ResourceError(
            f"memory ran out while the workers started ({last}); free memory, or raise the limit (ulimit -v, the container's)"
        )
    return WorkerCrashed(f"the server of the workers ended with {_how(code)}: {log}", log)


def server_hung(seconds: float, log: str) -> BertoptError:
    """Return the error of a server that was killed after `seconds` without an answer.

    OpenBLAS retries forever if it gets no memory while it is loaded.
    """
    hung = f"the server of the workers did not start within {seconds:g} s"
    if _limited():
        return ResourceError(f"{hung}, as happens when memory runs out while libraries are loaded; raise the limit (ulimit -v, the container's)", log)
    return WorkerCrashed(f"{hung}; look for a library that cannot be imported (bertopt doctor), or for a machine that is overloaded", log)


def worker_ended(op: str, code: int | None, left: list[int], log: str) -> BertoptError:
    """Return the error of a worker that ended during `op`; `code` is None where it only closed its connection.

    `left` are the ids of processes that it started and that could not be killed.
    """
    if code is None:
        return WorkerCrashed(f"the worker closed its connection during '{op}'{_undead(left)}", log)
    if code == -signal.SIGKILL:
        return ResourceError(
            f"the worker was killed by SIGKILL during '{op}', as the kernel does when memory{_or_cpu_time()} runs out; "
            f"use a smaller batch, {_more_memory()}, or run elsewhere{_undead(left)}",
            log,
        )
    if code == -signal.SIGXCPU:
        return ResourceError(f"the worker used up its CPU time during '{op}'{_OF_CPU_TIME}{_undead(left)}", log)
    how = _how(code)
    if out_of_threads.said(log):
        return ResourceError(f"the worker ended with {how} during '{op}': {out_of_threads.REMEDY}{_undead(left)}", log)
    if out_of_memory.said(log) or (code < 0 and _limited()):
        return ResourceError(
            f"the worker ended with {how} during '{op}', as libraries do when memory runs out; use a smaller batch, "
            f"free memory, or raise the limit (ulimit -v, the container's){_undead(left)}",
            log,
        )
    return WorkerCrashed(f"the worker ended with {how} during '{op}'{_undead(left)}", log)


def took_too_much(op: str, used: int, allowed: int, left: list[int], log: str) -> ResourceError:
    """Return the error of a worker that was killed for using more than `allowed` bytes of memory."""
    return ResourceError(
        f"the worker took {_size(used)} of memory during '{op}' and was ended; it may take "
        f"{_size(allowed)} here: use a smaller batch or model, shorter texts (max_seq_length in sentence_bert_config.json, or "
        f"model_max_length in tokenizer_config.json), or {_more_memory('a machine with more')}{_undead(left)}",
        log,
    )


def took_too_long(op: str, timeout: float, left: list[int], log: str) -> StepTimeout:
    """Return the error of a worker that was killed after `timeout` seconds without an answer."""
    return StepTimeout(f"'{op}' took longer than {timeout:g} s; raise the step's timeout, or look at what it does{_undead(left)}", log)


def tail(log: Path) -> str:
    """Return the last lines of a log, or those around faulthandler's last stack trace; empty where it cannot be read."""
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    start = max(0, fatal[-1] - _BEFORE) if fatal else max(0, len(lines) - LOG_TAIL)
    return "\n".join(lines[start:][:LOG_TAIL])


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _or_cpu_time() -> str:
    """Return what else than memory may have run out: at the hard limit of CPU time Linux kills a process, too."""
    return " or CPU time (ulimit -t)" if limits.has_cpu_time_limit() else ""


def _more_memory(otherwise: str = "free memory") -> str:
    """Return what to do to get more memory: raise the container's limit where there is one, or `otherwise`."""
    limit = limits.cgroup_memory_bytes()
    return otherwise if limit is None or limit >= limits.host_memory_bytes() else f"raise the container's memory limit ({_size(limit)})"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


def _limited() -> bool:
    """Return whether the limit on address space is below the machine's memory: a crash then most likely means that it ran out."""
    limit = limits.address_space_bytes()
    return limit is not None and limit < limits.host_memory_bytes()


def _undead(left: list[int]) -> str:
    return f"; its processes {', '.join(map(str, left))} could not be killed" if left else ""
