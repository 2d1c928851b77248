"""`--set` on the command line."""

from __future__ import annotations

import pytest

from bertopt.passes import CastHalf, ExportOnnx
from bertopt.recipe.parser import parse
from bertopt.results import Limits
from tests.support.recipes import EXPORT, HEAD, SDPA, problems, recipe


def test_overrides() -> None:
    steps = SDPA + "  - pass: cast_half\n    name: bf16\n"
    settings = (
        "steps.1.dtype=float16", "steps.bf16.mode=autocast", "steps.use_sdpa.limits.cosine_min=0.5", "device=cuda",
        "inputs.shapes=[[1, 8]]", "limits.int8={max_abs: 1e-2}", "revision=no", "inputs.shapes.0.1=9",
    )  # fmt: skip
    read = recipe(steps, overrides=settings)
    assert read.steps[1].pass_ == CastHalf(dtype="float16", mode="autocast")
    assert read.steps[0].limits.cosine_min == 0.5
    assert (read.device, read.revision, read.inputs.shapes) == ("cuda", "no", ((1, 9),))
    assert read.limits == {"int8": Limits(max_abs=0.01)}


def test_an_override_repairs_a_mistake_in_the_file() -> None:
    text = f"{HEAD}steps:\n  - pass: export_onnx\n    opset: 018\n"
    assert parse(text, overrides=["steps.0.opset=20"]).steps[0].pass_ == ExportOnnx(opset=20)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps.0.opset=x", "step 'export_onnx': opset must be a whole number; got 'x'"),
        ("steps.export_onnx.opest=20", "step 'export_onnx': unknown option 'opest'; did you mean 'opset'?"),
        ("steps.0.opset=010", "a number must not start with 0; got 010; write 10 or 8, or '010' for text"),
        ("steps.7.opset=20", "there is no item 7; expected 0 to 0"),
        ("steps.exprot_onnx.opset=20", "there is no step 'exprot_onnx'; did you mean 'export_onnx'?"),
        ("device.x=1", "'device' is a single value and has no 'x'"),
        ("devcie=cpu", "unknown key 'devcie'; did you mean 'device'?"),
        ("device", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("=cpu", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("steps..x=1", "expected KEY=VALUE, such as steps.1.dtype=float16"),
        ("device=[", "the value is not valid YAML: while parsing a flow node expected the node content"),
        ("device=!!str cpu", "tag '!!str' is not supported; write the plain value"),
        ("device=", "device must be 'auto', 'cpu' or 'cuda'; got null"),
        ("steps.0.limits={max_abs: 1, max_abs: 2}", "key 'max_abs' is given twice"),
        ("steps.0.after=later", "step 'export_onnx': after must name an earlier step; got 'later'; known: reference"),
    ],
)
def test_mistaken_overrides(setting: str, message: str) -> None:
    (problem,) = problems(f"{HEAD}device: cpu\nsteps:\n{EXPORT}", (setting,))
    assert problem.startswith(f"--set {setting}: {message}")


def test_overrides_come_after_the_file_in_the_list() -> None:
    found = problems(f"{HEAD}device: gpu\nsteps:\n{EXPORT}    zzz: 1\n", ("task=x", "steps.0.opset=1"))
    assert [problem.split(": ")[0] for problem in found] == [
        "r.yaml:3:9",
        "r.yaml:6:5",
        "--set task=x",
        "--set steps.0.opset=1",
    ]
