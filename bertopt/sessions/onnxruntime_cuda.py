"""ONNX Runtime's CUDA provider: its libraries, the options that decide what it computes, and why it could not start."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from bertopt.system import onnxruntime_import

#: Never ONNX Runtime's defaults: those round float32 products to TF32 (errors of 1e-3) and double what they allocate.
OPTIONS = {"device_id": "0", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}

_REASONS = (
    re.compile(r"(?:with error: |: )([\w.+-]+\.so[\w.]*: cannot open shared object file)"),
    re.compile(r"(Require cuDNN [^\n]*)"),
    re.compile(r"(CUDA driver version is insufficient[^\n]*)"),
    re.compile(r"(CUDA failure [^\n]*)"),
)


class Heard:
    """What was written to stderr, once `listening` has ended."""

    text = ""


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Collect what native libraries write to stderr: only there does ONNX Runtime say why CUDA did not start."""
    heard = Heard()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield heard
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            heard.text = file.read().decode("utf-8", "replace")


def preload(ort: Any) -> str:
    """Load CUDA and cuDNN from the packages that pip installed; return what could not be loaded.

    Where torch was imported first they are there already. A process that serves an ONNX artefact imports no torch.
    """
    said = io.StringIO()
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(said):
            ort.preload_dlls()
    return said.getvalue()


def why(text: str) -> str:
    """Return the reasons in what ONNX Runtime and the loader said, else its last line."""
    reasons = [match for pattern in _REASONS for match in pattern.findall(text)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(reasons)) or (lines[-1][:300] if lines else "it gave no reason")


def versions() -> str:
    """Return the CUDA versions that the wheel of ONNX Runtime and torch were built for, as a sentence."""
    try:
        validation = onnxruntime_import.module("onnxruntime.capi.onnxruntime_validation")
        wheel = str(getattr(validation, "cuda_version", "") or "an unknown version")
    except ImportError:
        wheel = "an unknown version"
    try:
        import torch

        other = str(torch.version.cuda or "no CUDA")
    except ImportError:
        other = "not installed"
    same = wheel.split(".")[0] == other.split(".")[0]
    advice = "" if same else "; both must be for one CUDA major version (onnxruntime-gpu 1.27 and later need CUDA 13)"
    return f"onnxruntime is built for CUDA {wheel}, torch for {other}{advice}"
