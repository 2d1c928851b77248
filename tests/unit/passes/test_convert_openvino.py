"""convert_openvino: exact in float32, close and steady in INT8, counted in the IR it wrote, and silent on the network."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt import stages
from bertopt.checks import parity
from bertopt.core import Context, Eager, Onnx, OpenVino, Result, RuntimeFacts
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import ConvertOpenvino, ExportOnnx, PackSequences, UseSdpa
from bertopt.quantization import calibration_inputs, openvino_ptq
from bertopt.recipe.parser import parse
from bertopt.results import Case
from bertopt.runtime.load import load
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.sessions.openvino import OpenVinoSession
from bertopt.sessions.packed import PackedSession
from bertopt.system import environment, openvino_import
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.tiny_models import WORDS, Tiny

TEXTS = tuple(" ".join(WORDS[(7 * i + j * j) % len(WORDS)] for j in range(2 + i % 17)) for i in range(40))


@dataclasses.dataclass
class Made:
    reference: Eager
    graph: Onnx
    snapshot: Path
    folder: Path

    def context(self, name: str) -> Context:
        tokenizer = Tokenizer(self.snapshot, self.reference.spec)

        def encode(texts: Sequence[Any]) -> dict[str, Any]:
            return tokenizer.batch(tokenizer.encode(texts))

        workdir = self.folder / name
        workdir.mkdir()
        return Context(workdir, texts=TEXTS, encode=encode)


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Made:
    pytest.importorskip("nncf")
    folder = tmp_path_factory.mktemp("openvino")
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    (folder / "snapshot").mkdir()
    checkpoint.write_snapshot(reference, folder / "snapshot")
    (folder / "graph").mkdir()
    graph = export(UseSdpa()(reference, Context(folder)).model, Context(folder / "graph"))
    return Made(reference, graph, folder / "snapshot", folder)


@pytest.fixture(scope="module")
def int8(made: Made) -> Result[OpenVino]:
    return ConvertOpenvino(precision="int8", samples=16, min_cosine=None)(made.graph, made.context("int8"))


def compared(made: Made, model: OpenVino) -> list[Case]:
    ours, theirs = open_session(model, threads=1), open_session(made.reference, threads=1)
    return cases(ours, theirs, made.reference.spec, [(1, 8), (4, 24)])


def effects(model: OpenVino, by: ConvertOpenvino) -> dict[str, tuple[int, int]]:
    return by.effects(model, open_session(model, threads=1).facts())


def test_float32_is_exact_and_counted(made: Made) -> None:
    by = ConvertOpenvino()
    result = by(made.graph, made.context("f32"))
    verdict = parity.judge(compared(made, result.model), parity.DEFAULT_LIMITS["float32"], None)
    assert verdict.passed, verdict.worst
    # Six products a layer: query, key, value, attention's output, and two of the feed-forward.
    assert result.changes["products"] == 6 * made.reference.spec.layers
    assert effects(result.model, by) == {"products that run in f32": (12, 12)}
    # Every layer's; the masked rows among the probes stay finite without them.
    assert result.changes["NaN_guards_dropped"] == made.reference.spec.layers
    kinds = {node.get_type_name() for node in openvino_import.openvino().Core().read_model(result.model.path).get_ops()}
    assert "IsNaN" not in kinds and "ScaledDotProductAttention" in kinds
    # Compressed to float16, which OpenVINO does unless told otherwise, the weights would be half as large.
    weights = sum(p.numel() for p in made.reference.network.parameters()) * 4
    assert result.model.path.with_suffix(".bin").stat().st_size > 0.9 * weights


def test_int8_quantises_every_product_and_all_of_them_run_so(made: Made, int8: Result[OpenVino]) -> None:
    assert int8.model.precision == "int8"
    assert (int8.changes["products"], int8.changes["int8_products"]) == (12, 12)
    by = ConvertOpenvino(precision="int8")
    assert effects(int8.model, by) == {
        "products with INT8 weights and input": (12, 12), "products that run in INT8": (12, 12),
    }  # fmt: skip
    found = compared(made, int8.model)
    assert min(case.cosine_mean for case in found) > 0.96
    assert max(case.max_abs for case in found) > 1e-4, "as exact as float32: nothing was quantised"


def test_without_smooth_quant_a_pooler_s_input_is_quantised_before_its_token_is_taken(
    tiny: Tiny, tmp_path: Path, export: Exports
) -> None:
    pytest.importorskip("nncf")
    reference, by = checkpoint.load(tiny("bert")), ConvertOpenvino(precision="int8", smooth_quant=None, min_cosine=None)
    checkpoint.write_snapshot(reference, tmp_path)
    graph = export(UseSdpa()(reference, Context(tmp_path)).model, Context(tmp_path))
    result = by(graph, Made(reference, graph, tmp_path, tmp_path).context("work"))
    assert result.changes["int8_products"] == result.changes["products"] == 14
    assert all(expected == found for expected, found in effects(result.model, by).values())


@pytest.mark.parametrize(("flags", "levels"), [("avx2", (63, 64)), ("avx2 avx512f avx512_vnni", (127, 128))])
def test_weights_have_seven_bits_where_eight_would_saturate(
    made: Made, monkeypatch: pytest.MonkeyPatch, flags: str, levels: tuple[int, ...]
) -> None:
    monkeypatch.setattr(environment, "_cpuinfo", lambda: f"flags : {flags}\n")
    by = ConvertOpenvino(precision="int8", samples=16, min_cosine=None)
    result = by(made.graph, made.context(f"int8 on {flags}"))
    graph = openvino_import.openvino().Core().read_model(result.model.path)
    weights = [node.input_value(1).get_node() for node in openvino_ptq.products(graph)]
    largest = {int(np.abs(stored(node).astype(int)).max()) for node in weights}
    assert largest <= set(levels), largest


def stored(node: Any) -> Any:
    """The 8-bit weights that a product's input comes from."""
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    assert node.get_output_element_type(0).to_string() == "i8"
    return node.data


def test_effects_see_a_model_that_was_not_quantised(made: Made) -> None:
    plain = ConvertOpenvino()(made.graph, made.context("not quantised")).model
    shown = effects(dataclasses.replace(plain, precision="int8"), ConvertOpenvino(precision="int8"))
    assert shown == {"products with INT8 weights and input": (12, 0), "products that run in INT8": (12, 0)}


@pytest.fixture(scope="module")
def packed_graph(made: Made) -> tuple[Eager, Onnx]:
    """A packed network and its graph."""
    eager = PackSequences(row_length=64)(
        UseSdpa()(made.reference, Context(made.folder)).model, Context(made.folder)
    ).model
    (made.folder / "packed").mkdir()
    return eager, ExportOnnx()(eager, Context(made.folder / "packed")).model


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_a_packed_network_is_calibrated_and_run_in_rows(made: Made, packed_graph: tuple[Eager, Onnx], precision: str) -> None:
    eager, graph = packed_graph
    by = ConvertOpenvino(precision=precision, samples=16, min_cosine=None)
    model = by(graph, made.context(f"packed openvino {precision}")).model
    assert model.spec.layout == "packed"
    session = OpenVinoSession(model, "cpu", threads=1)
    encode = made.context(f"packed texts {precision}").encode
    assert encode is not None
    inputs = calibration_inputs.as_network(model.spec, encode(TEXTS[:9]))
    got = calibration_inputs.valid_vectors(model.spec, inputs, session.run(inputs)["sentence_embedding"])
    with torch.inference_mode():
        answers = eager.network(*(torch.from_numpy(inputs[name]) for name in model.spec.network_inputs))
    wanted = calibration_inputs.valid_vectors(model.spec, inputs, answers[0].numpy())
    assert got.shape == (9, 32)
    cosine = (got * wanted).sum(axis=1) / np.linalg.norm(got, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosine.min() > (0.999999 if precision == "f32" else 0.95)
    shown = by.effects(model, session.facts())
    assert shown and all(expected == found for expected, found in shown.values()), shown
    # Where a text lies in its row, and beside which, shows in no bit of its INT8 answer.
    packed = PackedSession(session, model.spec)
    assert packed.block == (16 if precision == "int8" else 1)
    padded = encode(TEXTS)
    beside = packed.run(padded)["sentence_embedding"]
    # (A model this small may keep its bits anyway, so their cause is asserted too.)
    packed.load(padded)
    first = packed._packing.batch.inputs["first_tokens"] if packed._packing else np.zeros(0)
    assert first.any() and (precision == "f32" or not (first % 16).any())
    for number in range(0, len(TEXTS), 3):
        alone = packed.run({name: array[number : number + 1] for name, array in padded.items()})["sentence_embedding"][0]
        assert np.abs(alone - beside[number]).max() <= (1e-5 if precision == "f32" else 0)
    # A row as short as a single text that gets a model of its own, but with two texts in it.
    few = encode(["cat", "the dog"])
    for answers in (packed.run(few), next(packed.run_all([few]))):
        for number, got in enumerate(answers["sentence_embedding"]):
            alone = packed.run({name: array[number : number + 1] for name, array in few.items()})["sentence_embedding"]
            assert np.abs(got - alone[0]).max() <= (1e-5 if precision == "f32" else 0)


def test_static_scales_give_a_text_one_answer(made: Made, int8: Result[OpenVino]) -> None:
    tokenizer = Tokenizer(made.snapshot, made.reference.spec)
    session = open_session(int8.model, threads=1)
    alone = [session.run(tokenizer.batch(tokenizer.encode([text])))["sentence_embedding"][0] for text in TEXTS[:8]]
    beside = session.run(tokenizer.batch(tokenizer.encode(TEXTS)))["sentence_embedding"][:8]
    assert np.array_equal(beside, np.stack(alone))


def test_products_can_be_kept_in_float32(made: Made) -> None:
    name = "node_MatMul_does_not_exist"
    with pytest.raises(Unsupported, match=f"no product '{name}'; it has node_"):
        ConvertOpenvino(precision="int8", samples=16, keep_fp32=(name,))(made.graph, made.context("unknown"))
    products = _product_names(made)
    by = ConvertOpenvino(precision="int8", samples=16, min_cosine=None, keep_fp32=tuple(products[:3]))
    result = by(made.graph, made.context("kept"))
    assert result.changes["int8_products"] == 9
    assert {key for key in result.changes if "kept" in key} == {f"{name} kept in float32" for name in products[:3]}
    assert effects(result.model, by) == {
        "products with INT8 weights and input": (9, 9), "products that run in INT8": (9, 9),
    }  # fmt: skip


def test_products_go_back_to_float32_while_accuracy_is_missed(made: Made, int8: Result[OpenVino]) -> None:
    result = ConvertOpenvino(precision="int8", samples=16, min_cosine=0.999999)(made.graph, made.context("searched"))
    kept = [key for key in result.changes if key.endswith("kept in float32")]
    assert kept and result.changes["int8_products"] == 12 - len(kept)
    before, after = (np.mean([case.cosine_mean for case in compared(made, m)]) for m in (int8.model, result.model))
    assert after > before


def _product_names(made: Made) -> list[str]:
    graph = openvino_import.openvino().Core().read_model(made.graph.path)
    return sorted(
        node.get_friendly_name()
        for node in graph.get_ops()
        if node.get_type_name() == "MatMul" and node.get_friendly_name().startswith("node_")
    )


def test_bfloat16_is_refused_without_its_arithmetic(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    by = ConvertOpenvino(precision="bf16")
    monkeypatch.setattr(openvino_import, "runs_bfloat16", lambda: True)
    model = by(made.graph, made.context("bf16")).model
    assert model.precision == "bfloat16"
    monkeypatch.setattr(openvino_import, "runs_bfloat16", lambda: False)
    with pytest.raises(Unsupported, match="would run float32 instead; use precision: f32 or int8"):
        by(made.graph, made.context("no bf16"))
    with pytest.raises(Unsupported, match="would run float32 instead; export with"):
        open_session(model)
    # Where float32 runs although bfloat16 was claimed, effects say so.
    assert by.effects(model, RuntimeFacts(products={"f32": 12})) == {"products that run in bf16": (12, 0)}


def test_bfloat16_runs_where_there_is_its_arithmetic(made: Made) -> None:
    """In the products themselves: the answers are within bfloat16's limits, and further off than float32's ever are."""
    if not openvino_import.runs_bfloat16():
        pytest.skip("this CPU has no bfloat16 arithmetic")
    by = ConvertOpenvino(precision="bf16")
    model = by(made.graph, made.context("really bf16")).model
    found = compared(made, model)
    judged = parity.judge(found, parity.DEFAULT_LIMITS["bfloat16"], None)
    assert judged.passed, judged.worst
    assert max(case.rel_l2 for case in found) > 10 * (parity.DEFAULT_LIMITS["float32"].rel_l2 or 0)
    [(expected, ran)] = effects(model, by).values()
    assert ran == expected > 1


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ("[{pass: export_onnx}, {pass: fuse_ort}, {pass: convert_openvino}]", "does not know ONNX Runtime's own operators"),
        ("[{pass: export_onnx}, {pass: quantize_int8}, {pass: convert_openvino}]", "branch from the float graph"),
        ("[{pass: export_onnx}, {pass: cast_onnx_half}, {pass: convert_openvino}]", "say precision: bf16"),
        ("[{pass: export_onnx}, {pass: convert_openvino}, {pass: convert_openvino, name: twice}]", "convert_openvino"),
        ("[{pass: use_sdpa}, {pass: convert_openvino}]", "onnx"),
        ("[{pass: export_onnx}, {pass: convert_openvino, smooth_quant: 2}]", "smooth_quant"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_work_are_refused(steps: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse(f"schema_version: 1\nmodel: a/b\nsteps: {steps}\n", "r.yaml")


def test_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="run on a CPU here; say device: cpu"):
        parse(
            "schema_version: 1\nmodel: a/b\ndevice: cuda\nsteps: [{pass: export_onnx}, {pass: convert_openvino}]\n", "r"
        )


def test_int8_needs_texts_and_a_float32_graph(made: Made) -> None:
    with pytest.raises(Unsupported, match=r"name some in inputs\.texts"):
        ConvertOpenvino(precision="int8")(made.graph, dataclasses.replace(made.context("no texts"), texts=()))
    with pytest.raises(Unsupported, match="takes a float32 graph; got int8"):
        ConvertOpenvino()(dataclasses.replace(made.graph, precision="int8"), made.context("wrong"))


def test_an_artefact_for_other_instructions_is_refused(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ConvertOpenvino()(made.graph, made.context("isa")).model
    stages.inherit(made.snapshot, tmp_path)
    stages.write_form(model, tmp_path)
    described = stages.describe(model)
    manifest = stages.write_manifest(tmp_path, {"device": "cpu", "passes": [], **described})

    def claim(precision: str, isa: list[str]) -> None:
        fields = {"precision": precision, "environment": {**manifest.environment, "isa": isa}}
        (tmp_path / "manifest.json").write_text(manifest.model_copy(update=fields).sealed().text())

    monkeypatch.setattr(environment, "isa", lambda cpuinfo=None: ["avx2", "avx512f"])
    claim("int8", ["avx2", "avx512f", "avx512_vnni"])
    with pytest.raises(
        Unsupported, match=r"int8 and was measured with avx512_vnni; .* export again on a machine like this"
    ):
        load(tmp_path)
    claim("bfloat16", ["avx512_bf16", "amx_bf16"])
    with pytest.raises(Unsupported, match="was measured with amx_bf16, avx512_bf16"):
        load(tmp_path)
    # Exported without, it was measured without; and float32 needs neither.
    claim("int8", ["avx2"])
    assert load(tmp_path)(["the cat"]).shape == (1, 32)
    claim("float32", ["avx512_vnni"])
    assert load(tmp_path)(["the cat"]).shape == (1, 32)
    # Other instructions of the same kind will do.
    monkeypatch.setattr(environment, "isa", lambda cpuinfo=None: ["avx2", "avx_vnni"])
    claim("int8", ["avx512_vnni", "amx_int8"])
    assert load(tmp_path)(["the cat"]).shape == (1, 32)


_SILENT = """
import socket, sys
def refuse(*_, **__):
    raise OSError("no network in this test")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
{script}
print("openvino_telemetry" in sys.modules)
"""
_OURS = """
from bertopt.system import openvino_import
nncf, ov = openvino_import.nncf(), openvino_import.openvino()
import numpy as np
from openvino import opset13 as op
x = op.parameter([1, 4], np.float32)
graph = ov.Model([op.matmul(x, op.constant(np.ones((4, 4), np.float32)), False, True)], [x])
nncf.quantize(graph, nncf.Dataset([np.ones((1, 4), np.float32)]), subset_size=1)
"""


@pytest.mark.parametrize(("script", "loaded"), [("import openvino", "True"), (_OURS, "False")], ids=["plain", "ours"])
def test_nothing_is_reported_to_anybody(script: str, loaded: str, tmp_path: Path) -> None:
    """Imported plainly OpenVINO loads its telemetry, and writes to the user's home; through `openvino_import` it does neither."""
    pytest.importorskip("nncf")
    path = [str(Path(__file__).parents[3]), *(p for p in sys.path if p)]
    found = subprocess.run(
        [sys.executable, "-c", _SILENT.format(script=script)], capture_output=True, text=True, check=True,
        env={"HOME": str(tmp_path), "PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.stdout.split()[-1] == loaded
    assert (tmp_path / "intel").exists() == (loaded == "True")


def test_calibration_samples(made: Made) -> None:
    spec, ctx = made.reference.spec, dataclasses.replace(made.context("samples"), seed=3)
    first, again = (calibration_inputs.samples(spec, ctx, 12) for _ in range(2))
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(first, again, strict=True) for k in a)
    texts, odd = [s for s in first if len(s["input_ids"]) == 1], [s for s in first if len(s["input_ids"]) == 8]
    assert (len(texts), len(odd)) == (12, 6)
    left = odd[1]["attention_mask"]
    assert (left[:, -1] == 1).all() and (left[:, 0] == 0).any()
    framed = odd[0]
    last = framed["attention_mask"].sum(axis=1) - 1
    assert (framed["input_ids"][:, 0] == 2).all() and (framed["input_ids"][np.arange(8), last] == 3).all()
    assert all((s["input_ids"][s["attention_mask"] == 1] != spec.pad_id).all() for s in odd)


def test_calibration_packs_rows_for_a_packed_network(made: Made) -> None:
    spec = made.reference.spec.model_copy(update={"layout": "packed", "row_length": 8, "position_offset": 2})
    ids = np.array([[5, 6, 7, 0, 0], [0, 0, 8, 9, 9], [4, 4, 4, 4, 4], [3, 0, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    packed = calibration_inputs.as_network(spec, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0})
    assert list(packed) == list(spec.network_inputs)
    assert packed["input_ids"].tolist() == [[4, 4, 4, 4, 4, 5, 6, 7], [8, 9, 9, 3, 0, 0, 0, 0]]
    assert packed["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 0, 0, 0, 0]]
    # Left padding keeps its columns' positions, as the padded model has them.
    assert packed["position_ids"].tolist() == [[2, 3, 4, 5, 6, 2, 3, 4], [4, 5, 6, 2, 0, 0, 0, 0]]
    assert packed["first_tokens"].tolist() == [[0, 5], [0, 3]]
    answer = np.arange(2 * 2 * 2).reshape(2, 2, 2)
    assert calibration_inputs.valid_vectors(spec, packed, answer).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Counted positions begin after the padding index, which is 1 here.
    counted = spec.model_copy(update={"positions": "counted", "pad_id": 1})
    ids = np.where(mask, ids, 1)
    arrays = calibration_inputs.as_network(counted, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0})
    assert arrays["position_ids"].tolist() == [[2, 3, 4, 5, 6, 2, 3, 4], [2, 3, 4, 2, 0, 0, 0, 0]]


def test_old_names_of_options_warn_and_say_the_same() -> None:
    with pytest.warns(FutureWarning, match="option 'keep_float' is now 'keep_fp32'"):
        old = ConvertOpenvino.model_validate_json(
            '{"precision": "int8", "keep_float": ["a"], "ranges": "mean", "cosine": 0.9}', strict=True
        )
    new = ConvertOpenvino(precision="int8", keep_fp32=("a",), range_estimator="mean_minmax", min_cosine=0.9)
    assert old == new and old.record() == new.record()
    assert not {"keep_float", "ranges", "cosine"} & set(new.record().options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ConvertOpenvino().min_cosine == 0.96
