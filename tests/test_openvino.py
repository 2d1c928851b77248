"""The OpenVINO session, on a model converted by OpenVINO itself: no pass makes one yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt import checkpoint, stage
from bertopt.checks import parity, probes
from bertopt.core import Context, Eager, OpenVino
from bertopt.errors import Unsupported
from bertopt.passes import ExportOnnx, UseSdpa
from bertopt.sessions import open_session
from tests.conftest import Tiny


@pytest.fixture(scope="module")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Eager, OpenVino]:
    openvino = pytest.importorskip("openvino")
    reference = checkpoint.load(tiny())
    folder = tmp_path_factory.mktemp("openvino")
    graph = ExportOnnx(opset=20)(UseSdpa()(reference, Context(folder)).model, Context(folder)).model
    path = folder / "elsewhere" / "model.xml"
    openvino.save_model(openvino.convert_model(graph.path), path, compress_to_fp16=False)
    return reference, OpenVino(reference.spec, "float32", path)


def test_it_agrees_in_float32_where_the_cpu_has_bf16(models: tuple[Eager, OpenVino]) -> None:
    reference, model = models
    ours, theirs, spec = open_session(model), open_session(reference), reference.spec
    found = [
        parity.compare(probe, spec, parity.answer(ours, probe, spec), parity.answer(theirs, probe, spec))
        for probe in probes.grid(spec, [(2, 8)], None)
    ]
    verdict = parity.judge(found, parity.DEFAULT_LIMITS["float32"], None)
    assert verdict.passed, verdict.failures
    assert "32" in ours.facts()["precision"]


def test_a_stage_holds_it(models: tuple[Eager, OpenVino], tmp_path: Path) -> None:
    _, model = models
    stage.write_form(model, tmp_path)
    manifest = stage.write_manifest(tmp_path, {"device": "cpu", **stage.describe(model, tmp_path)})
    assert set(manifest["files"]) == {"openvino/model.xml", "openvino/model.bin"}
    assert open_session(stage.open_stage(tmp_path)).facts()["runtime"].startswith("openvino")


def test_it_runs_on_the_cpu_only(models: tuple[Eager, OpenVino]) -> None:
    with pytest.raises(Unsupported, match="set device: cpu"):
        open_session(models[1], "cuda")
