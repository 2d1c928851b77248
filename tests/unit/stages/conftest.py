"""One committed stage, for tests of what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt import stages
from bertopt.core import Onnx
from tests.support.specs import TWO_LABELS as SPEC


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """An ONNX stage with a tokenizer, committed."""
    part = tmp_path / ".part-x"
    (part / "onnx").mkdir(parents=True)
    (part / "onnx" / "model.onnx").write_bytes(b"graph" * 100)
    (part / "config.json").write_text("{}")
    model = Onnx(SPEC, "float32", part / "onnx" / "model.onnx")
    stages.write_manifest(part, {"key": "k", **stages.describe(model)})
    stages.commit(part, tmp_path / "final")
    return tmp_path / "final"
