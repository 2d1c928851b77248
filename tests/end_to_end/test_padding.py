"""Left padding and holes: a fusion that keeps no raw attention mask fails, the same fusion with it passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packaging.version import Version

import bertopt
from bertopt.passes import registry
from bertopt.results import Report
from tests.support import ort_optimizer
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import Tiny

FUSE = ort_optimizer.UseOrtOptimizer.name()
pytestmark = pytest.mark.skipif(
    Version(pytest.importorskip("onnxruntime").__version__) < Version("1.30"), reason="up to 1.29 ONNX Runtime's own optimizer finds no attention in these graphs"
)


@pytest.fixture(scope="module")
def ran(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """Three ways to an ONNX graph with fused attention, of which only one loses the mask."""
    recipe = {
        "schema_version": 1, "model": str(tiny("bert")), "device": "cpu", "inputs": {"shapes": [[2, 8], [3, 16]]},
        "steps": [
            {"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "fuse_ort"},
            {"pass": "export_onnx", "name": "opset20", "opset": 20, "after": "use_sdpa"},
            {"pass": "fuse_ort", "name": "fused20"},
            {"pass": FUSE, "name": "raw_mask", "raw_attention_mask": True, "after": "reference"},
            {"pass": FUSE, "name": "mask_index", "after": "reference"},
        ],
    }  # fmt: skip
    with cheap_workers("pipeline"), pytest.MonkeyPatch.context() as patch:
        # Known only here: other tests list the passes that make a graph.
        patch.setitem(registry._registered, FUSE, ort_optimizer.UseOrtOptimizer)
        yield bertopt.run(recipe, tmp_path_factory.mktemp("padding"))


def test_a_fusion_without_the_raw_mask_fails(ran: Report) -> None:
    stage = ran.stage("mask_index")
    assert (ran.exit_code, stage.status, stage.changes) == (3, "failed", {"attention": 2})
    assert stage.parity is not None
    assert stage.parity.worst.where.endswith((", left", ", holes"))
    wrong = {case.padding for case in stage.parity.cases if not case.max_abs <= 1e-4}
    assert wrong == {"left", "holes"}
    assert ran.delivered is None


@pytest.mark.parametrize("name", ["export_onnx", "fuse_ort", "opset20", "fused20", "raw_mask"])
def test_every_other_onnx_stage_is_within_float32_limits(ran: Report, name: str) -> None:
    stage = ran.stage(name)
    assert (stage.status, stage.form, stage.precision) == ("ok", "onnx", "float32"), stage.reason
    assert stage.parity is not None and stage.parity.limits.max_abs == 1e-4
    assert {"left", "holes", "right", "none", "masked_row", "one_token"} <= {
        case.padding for case in stage.parity.cases
    }


def test_the_worst_case_is_shown(ran: Report) -> None:
    parity = ran.stage("mask_index").parity
    assert parity is not None and parity.worst.tokens
    # A random probe: ids, those that the mask hides in brackets. Classifications have no worst token.
    assert all(token.strip("()").isdigit() for token in parity.worst.tokens)
    assert (parity.worst.text, parity.worst.token) == (None, None)


def test_every_stage_says_how_steady_it_is(ran: Report) -> None:
    for stage in ran.stages:
        assert stage.invariance is not None and stage.invariance.texts > 2
        # Right padding alone is what a mask index is made for.
        assert stage.invariance.max_abs < 1e-5, stage.name
