"""Which files a stage may hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.errors import IntegrityError
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
