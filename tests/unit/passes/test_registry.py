"""Passes by name, and passes restored from what a stage records."""

from __future__ import annotations

from typing import Any

import pytest

from bertopt import passes
from bertopt.core import Eager, Pass, Rewrite
from bertopt.errors import UsageError
from bertopt.passes import CastHalf, registry


def test_a_record_is_built_once_in_a_process() -> None:
    record = CastHalf(dtype="bfloat16").record()
    first = registry.restore(record)
    assert first == CastHalf(dtype="bfloat16") and registry.restore(record.model_copy()) is first
    assert registry.restore(CastHalf(dtype="float16").record()) != first


def test_a_class_registered_anew_is_not_the_old_one() -> None:
    def make() -> type[Pass[Any, Any]]:
        class Renewed(Pass[Eager, Eager]):
            def __call__(self, model: Any, ctx: Any) -> Any:
                raise NotImplementedError

        return passes.register(Renewed)

    try:
        made = [type(registry.restore(make()().record())) for _ in range(2)]
        assert made[0] is not made[1]
    finally:
        del registry._registered["renewed"]


def test_a_pass_that_is_not_registered_cannot_be_restored() -> None:
    with pytest.raises(UsageError, match="'no_such_pass' is not registered here"):
        registry.restore(Rewrite(name="no_such_pass", options={}))
