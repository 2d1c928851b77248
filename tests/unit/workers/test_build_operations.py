"""What a pass of one's own may return."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.core import Context, Eager, Onnx, OpenVino, Pass, Result
from bertopt.errors import PassFailed
from bertopt.passes import UseSdpa
from bertopt.workers import build_operations
from tests.support.example_passes import Touch
from tests.support.tiny_models import Tiny, write_tiny


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> Eager:
    from bertopt.modeling import checkpoint

    return checkpoint.load(tiny("bert"))


def test_what_a_pass_returns_is_named_where_it_is_no_result(model: Eager) -> None:
    build_operations.check_result(Touch(), Result(model, {"layers": 2}))
    wrong: list[tuple[Any, str]] = [
        (model, r"'touch' must return a Result, such as model.rewritten\(self\) or Result\(model, \{'layers': 6\}\); got Eager"),
        (None, "must return a Result, .*got NoneType"),
        (Result(Onnx(model.spec, "float32", model.checkpoint), {"nodes": 1}), "'touch' must give Eager; it gave Onnx"),
        (Result(model, None), r"'touch' must count what it changed and return that, such as \{'layers': 6\}, from rewrite or in its Result; got NoneType"),  # type: ignore[arg-type]
        (Result(model, model.network), "must count what it changed .*got Network"),  # type: ignore[arg-type]
        (Result(model, {"layers": "all"}), r"must count what it changed .*got \{'layers': 'all'\}"),  # type: ignore[dict-item]
    ]
    for returned, words in wrong:
        with pytest.raises(PassFailed, match=words):
            build_operations.check_result(Touch(), returned)
    with pytest.raises(TypeError, match="must return a Result"):
        build_operations.check_result(UseSdpa(), None)


class Draw(Pass[Onnx, Onnx]):
    """Gives a graph."""

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        raise NotImplementedError


class Draft(Pass[Onnx, OpenVino]):
    """Gives another form."""

    def __call__(self, model: Onnx, ctx: Context) -> Result[OpenVino]:
        raise NotImplementedError


def test_a_model_of_files_names_files_that_are_there(model: Eager, tmp_path: Path) -> None:
    """These ended with AttributeError, or as a damaged manifest that says to export again."""
    path = tmp_path / "model.onnx"
    path.touch()
    right = Onnx(model.spec, "float32", path)
    build_operations.check_result(Draw(), Result(right, {"nodes": 1}))
    wrong: list[tuple[Any, Any, str]] = [
        (Draw(), replace(right, path=str(path)), "'draw' must give a model whose path is a pathlib.Path; got '"),  # type: ignore[arg-type]
        (Draw(), replace(right, path=tmp_path / "other.onnx"), "must write the files of the model .*other.onnx' is not there"),
        (Draw(), replace(right, precision="fp32"), "whose precision is float32, float16, bfloat16, int8, float8; got 'fp32'"),  # type: ignore[arg-type]
        (Draft(), OpenVino(model.spec, "float32", path), "model.bin' is not there"),
    ]
    for by, made, words in wrong:
        with pytest.raises(PassFailed, match=words):
            build_operations.check_result(by, Result(made, {"nodes": 1}))


def test_what_an_artefact_does_otherwise_is_in_the_report(tmp_path: Path) -> None:
    """And nothing else that libraries warn of: only what loading the checkpoint says of it."""
    source, out = write_tiny(tmp_path / "model", task="feature-extraction", pooling="mean"), tmp_path / "out"
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "query_length": 8}))
    prompts = {"prompts": {"query": "the cat: "}, "default_prompt_name": "query", "truncate_dim": 16}
    (source / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    out.mkdir()
    build_operations.BuildOps().op_load_checkpoint({}, str(source), "auto", str(out), {"key": "k", "name": "reference", "device": "cpu"})
    said = stages.read_manifest(out).warnings
    for words in ("does not read 'query_length'", "puts no prompt before a text by default", "dropped truncate_dim 16", "dropped auto_map"):
        assert any(words in warning for warning in said), (words, said)
    assert len(said) == 4
