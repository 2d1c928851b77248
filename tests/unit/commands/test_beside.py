"""What one artefact is held to beside another, and what is said not to be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bertopt.checks.measurements import StageMeasurements
from bertopt.commands import beside
from bertopt.results import Case, Limits
from bertopt.results.fidelity import Certificate

CERTIFIED, CONTRADICTED, NONE = (Certificate(status=status, reason="why", weights=9) for status in ("certified", "contradicted", "none"))
OWN = {"pass mine": "0"}
SPEC = SimpleNamespace(sparse=False)


def manifest(form: str, precision: str, checkpoint: str | None = "abc", sources: dict[str, str] | None = None, passed: Limits | None = None) -> Any:
    return SimpleNamespace(
        form=form, precision=precision, checkpoint_sha256=checkpoint, sources=sources, passes=(), key="", stage="new", name="new", answers=None, spec=SPEC,
        passed_limits=lambda: passed,
    )  # fmt: skip


def of(certificate: Certificate | None) -> StageMeasurements:
    return StageMeasurements(certificate=certificate)


@pytest.mark.parametrize(
    ("before", "after", "certificate", "said"),
    [
        (manifest("native", "int8"), manifest("native", "int8"), CERTIFIED, ["errors with those that int8 explains"]),
        (manifest("native", "int8"), manifest("native", "int8"), CONTRADICTED, ["errors with those that int8 explains"]),
        (manifest("onnx", "int8"), manifest("onnx", "bfloat16"), NONE, ["weights: why", "errors with those that int8 explains"]),
        (manifest("onnx", "int8"), manifest("native", "int8"), None, ["weights: form 'native' beside form 'onnx'", "errors with"]),
        (manifest("onnx", "int8"), manifest("onnx", "float32"), CERTIFIED, ["errors with those that int8 explains"]),
        (manifest("onnx", "float32"), manifest("openvino", "float32"), None, []),
        (manifest("onnx", "float32"), manifest("openvino", "float32", "def"), None, ["the candidate with its own checkpoint: they are of two"]),
        (manifest("onnx", "int8", None), manifest("onnx", "int8"), CERTIFIED, ["the candidate with its own checkpoint: a manifest does not name"]),
    ],
)  # fmt: skip
def test_what_is_not_compared_is_said(before: Any, after: Any, certificate: Certificate | None, said: list[str]) -> None:
    found = beside.not_compared(before, after, of(certificate), None, checked=False)
    assert len(found) == len(said) and all(text.startswith(words) for text, words in zip(found, said, strict=True)), found


@pytest.mark.parametrize(
    ("form", "precision", "certificate", "said"),
    [
        ("native", "int8", CERTIFIED, 0), ("native", "int8", CONTRADICTED, 0), ("onnx", "int8", NONE, 1), ("onnx", "float32", NONE, 0),
        ("eager", "bfloat16", NONE, 0), ("packaged", "bfloat16", None, 1),
    ],
)  # fmt: skip
def test_what_the_checkpoint_does_not_show_either(form: str, precision: str, certificate: Certificate | None, said: int) -> None:
    for checkpoint in ("abc", "def"):
        found = beside.not_compared(manifest("eager", "bfloat16", checkpoint), manifest(form, precision), of(None), certificate, checked=True)
        assert len(found) == said and all(text.startswith("weights: with the checkpoint only rows of tables") for text in found), found


def test_a_torch_artefact_holds_the_checkpoint() -> None:
    after = manifest("native", "int8")
    assert beside.holds_checkpoint(manifest("eager", "bfloat16"), after) and beside.holds_checkpoint(manifest("compiled", "float32"), after)
    for other in (manifest("onnx", "float32"), manifest("eager", "float32", "def"), manifest("eager", "float32", None), manifest("eager", "float32", sources=OWN)):
        assert not beside.holds_checkpoint(other, after)
    assert not beside.holds_checkpoint(manifest("eager", "float32", None), manifest("native", "int8", None))


def failures(before: Any, after: Any, certificate: Certificate | None, cosine: float = 1.0, **stated: Any) -> list[str]:
    case = Case(batch=4, sequence=8, padding="text", max_abs=0.1, rel_l2=0.1, cosine_min=cosine, cosine_mean=cosine, cosine_median=cosine, label_flips=None, compared=4, where="x")
    new = StageMeasurements(certificate=certificate, cases=[case])
    held = beside.limits(before, after, Limits(**stated), 1.0)
    return [change.what for change in beside.changes(before, after, new, held, "b") if change.regression]


def test_a_contradicted_weight_is_a_regression_unless_a_recipe_allows_it() -> None:
    first, second = manifest("native", "int8"), manifest("native", "int8")
    assert failures(first, second, CONTRADICTED) == ["weights"] and failures(first, second, CERTIFIED) == failures(first, second, NONE) == []
    assert failures(first, manifest("native", "int8", passed=Limits(certified=False)), CONTRADICTED) == []
    assert failures(first, second, CONTRADICTED, certified=False) == []
    assert failures(first, manifest("native", "int8", "def"), CONTRADICTED) == []
    assert failures(first, manifest("native", "int8", sources=OWN), CONTRADICTED) == []


def test_two_roundings_may_differ_more_than_one() -> None:
    """The cosine of INT8 must be 0.91 beside the checkpoint; two roundings differ twice as much in it."""
    int8, plain = manifest("native", "int8"), manifest("native", "float32")
    assert failures(int8, int8, None, 0.83) == [] and failures(int8, int8, None, 0.81) == ["cosine_median_min"]
    assert failures(plain, int8, None, 0.92) == [] and failures(plain, int8, None, 0.9) == ["cosine_median_min"]
    assert failures(int8, manifest("native", "int8", "def"), None, 0.5) == []
