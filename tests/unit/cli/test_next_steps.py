"""What `bertopt optimize` says at its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.cli import optimize
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny


@pytest.mark.parametrize(("form", "opens"), [("onnx", True), ("eager", False)])
def test_sentence_transformers_is_named_only_where_it_opens_the_artefact(
    form: Any, opens: bool, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artefact = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "artifact", form)
    optimize._next_steps(artefact, "org/name", portable=True)
    said = capsys.readouterr().out
    assert ("SentenceTransformer" in said) is opens and ("Only bertopt opens" in said) is not opens


def test_the_example_of_a_model_that_fills_masks_has_an_answer(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artefact = write_artefact(tiny("roberta", "fill-mask"), tmp_path / "artifact", "eager")
    optimize._next_steps(artefact, "org/name", portable=False)
    text = json.loads(capsys.readouterr().out.split("predict(")[1].split(")")[0])
    [answer] = bertopt.load(artefact)(text)
    assert len(answer) > 0
