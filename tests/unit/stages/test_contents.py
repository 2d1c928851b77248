"""Which files a stage may hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.errors import IntegrityError, WrongAnswer
from bertopt.stages import contents


@pytest.mark.parametrize(
    ("form", "name", "words"),
    [
        ("onnx", "onnx/model.onnx.data", "and onnx/model.onnx and onnx/model.onnx_data; the pass wrote 'onnx/model.onnx.data': give it such a name"),
        ("openvino", "openvino/model.xml", "openvino/openvino_model.xml and openvino/openvino_model.bin; the pass wrote"),
        ("eager", "log.txt", r"\*.safetensors; the pass wrote 'log.txt'"),
    ],
)
def test_a_file_of_another_name_says_which_names_there_are(form: str, name: str, words: str) -> None:
    parent: Any = SimpleNamespace(files={})
    made: Any = SimpleNamespace(form=form, files={name: SimpleNamespace(sha256="")})
    with pytest.raises(IntegrityError, match=words):
        contents.check(parent, made)


@pytest.mark.parametrize(("made_of", "advice"), [(None, "restore it, or"), ("abc", "restore it, or"), ("def", "give the checkpoint that the artefact was made of")])
def test_a_tokenizer_of_another_checkpoint(made_of: str | None, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint whose download was interrupted, or of the next commit, the artefact was said to be the wrong one."""
    monkeypatch.setattr(contents, "check_said", lambda *_: None)
    versions = {"bertopt_version": "1", "environment": {"packages": {}}, "spec": None}
    reference: Any = SimpleNamespace(**versions, checkpoint_sha256="abc", files={"tokenizer.json": SimpleNamespace(sha256="1")})
    artefact: Any = SimpleNamespace(**versions, checkpoint_sha256=made_of, files={"tokenizer.json": SimpleNamespace(sha256="2")})
    with pytest.raises(WrongAnswer, match=f"'tokenizer.json' of the artefact must be the checkpoint's; it differs: {advice}"):
        contents.check_artefact(reference, artefact)
