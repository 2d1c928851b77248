"""Inputs that a session refuses, in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.core import Context, Model
from bertopt.errors import UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, PackSequences, UseSdpa
from bertopt.sessions import open_session
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> dict[str, Model]:
    def at(name: str) -> Context:
        return Context(Path(tmp_path_factory.mktemp(name)))

    eager = UseSdpa()(checkpoint.load(tiny()), at("eager")).model
    graph = export(eager, at("onnx"))
    return {
        "eager": eager, "onnx": graph, "openvino": ConvertOpenvino()(graph, at("openvino")).model,
        "packed": PackSequences()(eager, at("packed")).model,
    }  # fmt: skip


def batch() -> dict[str, Any]:
    ids = np.array([[2, 5, 6, 3]], np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("form", ["eager", "onnx", "openvino", "packed"])
def test_a_missing_input_is_named(models: dict[str, Model], form: str) -> None:
    session = open_session(models[form], threads=1)
    inputs = batch()
    session.run(inputs)
    del inputs["token_type_ids"]
    with pytest.raises(UsageError, match=r"takes input_ids, attention_mask, token_type_ids; got no token_type_ids"):
        session.run(inputs)
    with pytest.raises(UsageError, match="got no token_type_ids"):
        list(session.run_all([inputs]))


@pytest.mark.parametrize("length", [4, 40])
def test_ids_beyond_int32_are_not_answered_for_another(models: dict[str, Model], length: int) -> None:
    session = open_session(models["openvino"], threads=1)
    inputs = {name: np.resize(array, (1, length)) for name, array in batch().items()}
    session.run(inputs)
    inputs["input_ids"] = inputs["input_ids"] + 2**32
    for run in (session.run, lambda given: list(session.run_all([given]))):
        with pytest.raises(UsageError, match=r"input_ids must be below the vocabulary's \d+; got 4294967\d+"):
            run(inputs)
