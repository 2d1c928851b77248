"""What a pass of one's own may return."""

from __future__ import annotations

from typing import Any

import pytest

from bertopt.core import Eager, Onnx, Result
from bertopt.errors import PassFailed
from bertopt.passes import UseSdpa
from bertopt.workers import build_operations
from tests.support.example_passes import Touch
from tests.support.tiny_models import Tiny


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
