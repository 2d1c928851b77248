"""One contender's process: reads a request a line on stdin, answers with a JSON line on what was stdout.

    PYTHON benchmarks/peers/server.py '{"load": "loaders:optimum", "directory": …, "threads": 2, …}'

Run by the contender's own python, so it imports only the standard library, numpy and the function named by `load`. Requests: `texts` keeps named texts, `run` times calls on some of them, `answers` gives what the model says.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Model = Callable[[Sequence[str]], Any]

PACKAGES = (
    "torch", "transformers", "tokenizers", "sentence-transformers", "optimum", "optimum-onnx", "optimum-intel", "numpy",
    "onnx", "onnxruntime", "openvino", "nncf", "ctranslate2", "torchao", "llama-cpp-python", "bertopt", "bertopt-native",
)  # fmt: skip


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def opened(options: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    """The model that `options["load"]`, a `module:function`, gives for them, and what is known of it."""
    module, name = options["load"].split(":")
    begin = time.perf_counter()
    model, facts = getattr(importlib.import_module(module), name)(options)
    taken = round(time.perf_counter() - begin, 3)
    return model, {"python": platform.python_version(), "versions": versions(), "load_s": taken, **facts}


def timed(model: Model, texts: Sequence[str], window: int) -> list[float]:
    """Seconds of each call on `window` texts after another, in the order given; 0 is one call on all."""
    size = window or len(texts)
    taken = []
    for start in range(0, len(texts), size):
        few = texts[start : start + size]
        begin = time.perf_counter()
        model(few)
        taken.append(time.perf_counter() - begin)
    return taken


def described(answers: Any) -> dict[str, Any]:
    """Vectors [N, H] as base64 of little-endian float32, labels as they are. A sparse tensor counts as the vectors that it stands for."""
    if isinstance(answers, list) and (not answers or isinstance(answers[0], str)):
        return {"labels": answers}
    import numpy as np

    if getattr(answers, "is_sparse", False):
        answers = answers.to_dense().float().numpy()
    array = np.ascontiguousarray(np.asarray(answers), dtype="<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def peak_rss_mib() -> int:
    """Of this program. getrusage also counts what the process had before it became this program: its parent's memory."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / 1024)


class Server:
    """What one contender can be asked. Every method's keyword arguments are a request's fields."""

    def __init__(self, model: Model, facts: dict[str, Any]) -> None:
        self.model, self.facts_found, self.kept = model, facts, dict[str, list[str]]()

    def facts(self) -> dict[str, Any]:
        return {**self.facts_found, "peak_rss_mib": peak_rss_mib()}

    def texts(self, name: str, texts: list[str]) -> int:
        self.kept[name] = texts
        return len(texts)

    def run(self, name: str, start: int, stop: int, window: int) -> dict[str, Any]:
        begin = time.process_time()
        taken = timed(self.model, self.kept[name][start:stop], window)
        return {"seconds": taken, "cpu_s": time.process_time() - begin}

    def answers(self, name: str) -> dict[str, Any]:
        return described(self.model(self.kept[name]))


def main() -> None:
    # What libraries print must not get between the answers.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    options = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity") and options.get("cores"):
        os.sched_setaffinity(0, options["cores"])
    try:
        server = Server(*opened(options))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    say({"result": server.facts()})
    operations = {"facts": server.facts, "texts": server.texts, "run": server.run, "answers": server.answers}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"result": operations[request.pop("op")](**request)})  # type: ignore[operator]
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
