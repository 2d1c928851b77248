"""One committed stage, for tests of what is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt import stages
from tests.support.artefacts import write_placeholder
from tests.support.specs import TWO_LABELS as SPEC


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """An ONNX stage with a tokenizer, committed."""
    stages.commit(write_placeholder(tmp_path / ".part-x", SPEC), tmp_path / "final")
    return tmp_path / "final"
