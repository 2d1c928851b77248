"""Every form of a checkpoint that a CPU runs, from text to raw output, and checkpoints whose config.json was changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertopt.core import Context
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, ExportOnnx, UseSdpa
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session

TEXTS = ("the cat sat on the mat", "", "a dog", "it was very good , she ran " * 5)


def with_config(directory: Path, name: str = "config.json", **fields: Any) -> Path:
    """Change fields of a checkpoint's configuration in place; `...` takes one out."""
    path = directory / name
    stated = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({field: value for field, value in stated.items() if value is not ...}))
    return directory


def answers(model: Any, directory: Path, texts: Sequence[str] = TEXTS) -> list[np.ndarray]:
    """The raw output of each text, of one call for all."""
    predictor = Predictor(open_session(model, threads=1), model.spec, directory)
    asked = [("who sat", text) for text in texts] if model.spec.task == "question-answering" else texts
    return [np.asarray(row[model.spec.outputs[0]]) for row in predictor.raw(asked)]


def forms(directory: Path, folder: Path, *, sdpa: bool = True) -> list[Any]:
    """The checkpoint with exchanged attention, where it has any to exchange, in ONNX and in OpenVINO."""
    for name in ("onnx", "openvino"):
        (folder / name).mkdir()
    loaded = checkpoint.load(directory)
    faster = [UseSdpa()(loaded, Context(folder)).model] if sdpa else []
    onnx = ExportOnnx(opset=20)([loaded, *faster][-1], Context(folder / "onnx", shapes=((2, 8), (3, 16)))).model
    return [*faster, onnx, ConvertOpenvino()(onnx, Context(folder / "openvino")).model]


def assert_answers_of_the_checkpoint(models: Sequence[Any], directory: Path, texts: Sequence[str] = TEXTS) -> None:
    """Fail where a form answers a text otherwise than the checkpoint, beyond float32's rounding."""
    wanted = answers(checkpoint.load(directory), directory, texts)
    for model in models:
        for got, expected in zip(answers(model, directory, texts), wanted, strict=True):
            assert np.allclose(got, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
