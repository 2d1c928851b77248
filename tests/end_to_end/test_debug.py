"""`bertopt debug`: the culprit is named in every form, and what it says to keep in float32 makes the stage pass."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import bertopt
from bertopt.checks.probes import Probe
from bertopt.cli import main
from bertopt.commands.debug import debug
from bertopt.commands.minimal_set import Search
from bertopt.core import Context, RuntimeFacts
from bertopt.debug.findings import DebugFindings, Row
from bertopt.debug.tensor_difference import differ, first_jump
from bertopt.errors import Unsupported, UsageError
from bertopt.passes import CastHalf, ExportOnnx
from bertopt.recipe.parser import from_dict
from tests.support import debug_passes
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import Tiny, write_tiny

Debug = Callable[..., DebugFindings]
SDPA, ONNX, FUSE, INT8, HALF = (
    {"pass": name} for name in ("use_sdpa", "export_onnx", "fuse_ort", "quantize_int8", "cast_onnx_half")
)
LAYER1 = "encoder.bert.encoder.layer.1."


@pytest.fixture(scope="module", autouse=True)
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # One of their own, so that what is left there is theirs.
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        with cheap_workers("pipeline", "commands.debug"):
            yield


def recipe(checkpoint: Path, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema_version": 1, "model": str(checkpoint), "device": "cpu",
        "inputs": {"shapes": [[1, 8], [2, 8]]}, "steps": steps,
    }  # fmt: skip


@pytest.fixture(scope="module")
def look(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Debug:
    """`look(steps, family, task, pooling)`: what debug finds of the last step. One directory: stages are shared."""
    out = tmp_path_factory.mktemp("debug")

    def go(steps: list[dict[str, Any]], family: str = "bert", task: str = "text-classification", pooling: str | None = None) -> DebugFindings:  # fmt: skip
        last = steps[-1].get("name", steps[-1]["pass"])
        return debug(from_dict(recipe(tiny(family, task, pooling), steps)), out, last)

    return go


# One layer's weights are spoilt; debug names it.


def spoil_torch(weight: str) -> dict[str, Any]:
    return {"pass": "spoil_torch", "weight": LAYER1 + weight}


def spoil_onnx(nth: int, op: str = "MatMul") -> dict[str, Any]:
    return {"pass": "spoil_onnx", "nth": nth, "op": op}


SPOILT: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "torch": ([SDPA, spoil_torch("attention.self.value.weight")], "layer 1 attention", "attention.self.value"),
    "torch, other layers in their place": (
        [spoil_torch("output.dense.weight"), {"pass": "use_better_transformer"}],
        "layer 1 output", "encoder.encoder.layers.1",
    ),
    "torch, half precision": (
        [SDPA, {"pass": "cast_half"}, spoil_torch("output.dense.weight")], "layer 1 output", "output.dense",
    ),
    "onnx": ([SDPA, ONNX, spoil_onnx(8)], "layer 1 attention", "linear_8"),
    # The bias is fused with the activation: the product alone is no module's answer.
    "onnx, fused": ([SDPA, ONNX, FUSE, spoil_onnx(10)], "layer 1 output", "gelu_1"),
    "onnx, query, key and value fused away": (
        [SDPA, {**ONNX, "opset": 20}, FUSE, spoil_onnx(1, "Attention")], "layer 1 attention", r"view_\d",  # by torch, 7 or 9
    ),
    "onnx, half precision": ([SDPA, ONNX, HALF, spoil_onnx(9)], "layer 1 attention", "linear_9"),
    "onnx, int8": ([SDPA, ONNX, INT8, spoil_onnx(8, "MatMulInteger")], "layer 1 attention", "linear_8"),
    "onnx, fused and int8": (
        [SDPA, ONNX, FUSE, INT8, spoil_onnx(10, "MatMulInteger")], "layer 1 output", "gelu_1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_the_spoilt_layer_and_tensor_are_named(look: Debug, case: str) -> None:
    steps, layer, tensor = SPOILT[case]
    found = look(steps)
    assert found.first_layer is not None and found.first_tensor is not None
    assert found.first_layer.label == layer
    assert re.search(f"{tensor}$", found.first_tensor.tensor)
    # Only what is spoilt: errors that merely arrive from it are no errors of the layers after.
    own = {row.label: row.own for row in found.layers}
    assert own.pop(layer) > 4 * max(own.values())
    assert found.first_tensor.row in (0, 1) or "text" in found.first_tensor.probe
    assert found.first_tensor.token is not None


@pytest.mark.parametrize("family", ["albert", "distilbert", "roberta", "megatron-bert"])
def test_other_families(look: Debug, family: str) -> None:
    # ALBERT's two layers share their weights; in the graph each has its own nodes.
    found = look([SDPA, ONNX, spoil_onnx(8)], family)
    assert found.first_layer is not None
    assert found.first_layer.label == "layer 1 attention"


def test_a_graph_without_names_is_matched_by_value(look: Debug) -> None:
    found = look([SDPA, ONNX, {"pass": "forget_names"}, spoil_onnx(8)])
    assert [row.label for row in found.layers[:5]] == [
        "embeddings", "layer 0 attention", "layer 0 output", "layer 1 attention", "layer 1 output",
    ]  # fmt: skip
    assert found.first_layer is not None and found.first_layer.label == "layer 1 attention"


@pytest.mark.parametrize("steps", [[SDPA], [SDPA, ONNX], [SDPA, ONNX, FUSE], [{"pass": "use_better_transformer"}]])
def test_a_right_stage_has_no_jump(look: Debug, steps: list[dict[str, Any]]) -> None:
    found = look(steps)
    assert found.first_layer is None
    assert max(row.total for row in found.layers) < 1e-5
    assert found.layers[-1].label == "logits"


def test_pooled_models_end_in_their_answer(look: Debug) -> None:
    found = look([SDPA, ONNX], task="feature-extraction", pooling="mean")
    assert found.layers[-1].label == "sentence_embedding" and found.layers[-1].total < 1e-5


# Reduced precision: what to keep.


def test_an_overflow_is_found_and_the_printed_step_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkpoint = write_tiny(tmp_path_factory.mktemp("overflow"))
    debug_passes.overflow(checkpoint)
    data = recipe(checkpoint, [SDPA, ONNX, {**HALF, "name": "half"}])
    report = bertopt.run(data, tmp_path / "out")
    assert report.exit_code == 3 and report.stage("export_onnx").status == "ok"
    stages = sorted((tmp_path / "out" / "stages").iterdir())
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(SystemExit) as ended:
        main(["debug", str(file), "--stage", "half", "--out", str(tmp_path / "out"), "--json"])
    assert ended.value.code == 0
    found = DebugFindings.model_validate_json(capsys.readouterr().out)
    # The run's own stages were looked at, on the probe that was worst there.
    assert sorted((tmp_path / "out" / "stages").iterdir()) == stages
    worst = report.stage("half").parity
    assert worst is not None and worst.worst.where.endswith(found.probes[0])
    assert found.first_layer is not None and found.first_layer.label == "layer 1 attention"
    assert found.first_tensor is not None and found.first_tensor.label == "layer 1 · attention.self.value"
    assert found.first_tensor.peak > 65504
    assert found.keep is not None and found.keep.minimal and 0 < len(found.keep.names) < 10
    assert "node_scaled_dot_product_attention_1" in found.keep.names
    data["steps"][2:] = yaml.safe_load(found.keep.recipe)
    assert bertopt.run(data, tmp_path / "kept").exit_code == 0


def test_bfloat16_in_torch_keeps_modules_and_the_printed_step_passes(tiny: Tiny, tmp_path: Path) -> None:
    # All token vectors: unlike three logits, their error hardly depends on the tokens.
    limits = {"rel_l2": 0.0053}
    data = recipe(tiny(task="feature-extraction"), [SDPA, {"pass": "cast_half", "name": "bf16", "limits": limits}])
    assert bertopt.run(data, tmp_path).exit_code == 3
    found = debug(from_dict(data), tmp_path, "bf16")
    assert found.keep is not None and found.keep.minimal
    (step,) = yaml.safe_load(found.keep.recipe)
    data["steps"][1] = {**step, "limits": limits}
    report = bertopt.run(data, tmp_path)
    assert report.exit_code == 0, report.reason


@pytest.mark.parametrize("scheme", ["dynamic", "static"])
def test_the_product_that_ruins_int8_is_kept_and_the_printed_step_passes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, scheme: str
) -> None:
    checkpoint = write_tiny(tmp_path_factory.mktemp("outlier"))
    debug_passes.outlier(checkpoint)
    limits = {"rel_l2": 0.35, "cosine_min": 0.9, "cosine_mean": 0.96, "label_flips_max": 0.1}
    step = {**INT8, "scheme": scheme, "limits": limits}
    data = recipe(checkpoint, [SDPA, ONNX, step])
    report = bertopt.run(data, tmp_path)
    assert report.exit_code == 3 and report.stage("export_onnx").status == "ok"
    found = debug(from_dict(data), tmp_path, "quantize_int8")
    assert found.keep is not None and len(found.keep.names) < 4, found.notes
    # The output projection of the second layer's attention, of six products a layer.
    from bertopt.core import Onnx
    from bertopt.quantization import qdq
    from bertopt.stages import open_stage

    parent = next(path for path in (tmp_path / "stages").iterdir() if path.name.startswith("export_onnx"))
    model = open_stage(parent)
    assert isinstance(model, Onnx)
    import onnx_ir

    assert qdq.products(onnx_ir.load(model.path).graph)[9].name in found.keep.names
    assert not any("CPU kernels compute much of float16" in note for note in found.notes)
    (kept,) = yaml.safe_load(found.keep.recipe)
    data["steps"][2] = {**kept, "limits": limits}
    again = bertopt.run(data, tmp_path)
    assert again.exit_code == 0, again.reason


def test_what_fails_in_float32_too_is_not_searched(look: Debug) -> None:
    found = look([SDPA, ONNX, HALF, spoil_onnx(9)])
    assert found.keep is None
    assert any("the error is not the precision's" in note for note in found.notes)


def passing(needed: set[str]) -> Callable[[list[str]], bool]:
    return lambda names: needed <= set(names)


@pytest.mark.parametrize("needed", [{"a0"}, {"a3", "a11", "a12"}, {f"a{i}" for i in range(5, 9)}])
def test_the_search_keeps_just_what_is_needed(needed: set[str]) -> None:
    search = Search(passing(needed), 80)
    assert search.flat([f"a{i}" for i in range(40)])
    assert search.best is not None and set(search.best) == needed
    assert len(search.asked) < 40


def test_the_search_descends_into_modules() -> None:
    tree = {"": ["base", "head"], "base": ["base.0", "base.1"], "base.1": ["base.1.a", "base.1.b"]}

    def ask(names: list[str]) -> bool:
        return "base" in names or "base.1" in names or "base.1.b" in names

    search = Search(ask, 80)
    assert search.tree(tree) and search.best == ["base.1.b"]
    whole = Search(lambda names: "base" in names or "base.1" in names, 80)
    assert whole.tree(tree) and whole.best == ["base.1"]


def test_a_search_that_runs_out_says_so() -> None:
    search = Search(passing({"a3", "a11", "a12", "a30"}), 8)
    assert not search.flat([f"a{i}" for i in range(40)])
    assert search.best is not None and {"a3", "a11", "a12", "a30"} <= set(search.best)
    none = Search(lambda _: False, 80)
    assert not none.flat(["a"]) and none.best is None


# `keep_fp32` of cast_half.


def cast(checkpoint: Path, keep: tuple[str, ...]) -> Any:
    from bertopt.modeling import checkpoint as checkpoints

    model = checkpoints.load(str(checkpoint), "auto")
    apply = CastHalf(keep_fp32=keep)
    return apply, apply(model, Context(checkpoint)).model


@pytest.mark.parametrize(
    "keep",
    [("layer.1.output",), ("bert.embeddings",), ("query",), ("layer.0.attention.self", "classifier"), ("*LayerNorm",)],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_kept_modules_stay_float32_and_the_network_runs(tiny: Tiny, keep: tuple[str, ...], attention: str) -> None:
    import torch

    apply, model = cast(tiny(), keep)
    if attention == "sdpa":
        model = bertopt.passes.UseSdpa()(model, Context(Path())).model
    (answer,) = model.network(*model.network.example(2, 8))
    assert answer.isfinite().all()
    effects = apply.effects(model, RuntimeFacts())
    assert len(effects) == 2 and all(expected == found > 0 for expected, found in effects.values())
    name = keep[0].strip("*")
    tensors = [t for n, t in model.network.encoder.named_parameters() if name in n]
    assert tensors and all(t.dtype == torch.float32 for t in tensors)


def test_a_kept_layer_computes_in_float32(tiny: Tiny) -> None:
    _, plain = cast(tiny(), ())
    _, kept = cast(tiny(), ("bert", "classifier"))
    from bertopt.modeling import checkpoint as checkpoints

    reference: Any = checkpoints.load(str(tiny()), "auto").network
    (wanted,), (half,), (same,) = (n(*reference.example(2, 8)) for n in (reference, plain.network, kept.network))
    assert not half.equal(wanted) and same.equal(wanted)


def test_kept_modules_survive_an_export(tiny: Tiny, tmp_path: Path) -> None:
    _, model = cast(tiny(), ("layer.1.output",))
    onnx = ExportOnnx()(model, Context(tmp_path)).model
    assert onnx.path.is_file()


def test_tied_weights_are_kept_together(tiny: Tiny) -> None:
    import torch

    _, model = cast(tiny(task="fill-mask"), ("word_embeddings",))
    (answer,) = model.network(*model.network.example(2, 8))
    assert answer.isfinite().all()
    assert model.network.encoder.get_output_embeddings().weight.dtype == torch.float32


def test_keep_fp32_must_name_modules_and_goes_with_cast(tiny: Tiny) -> None:
    with pytest.raises(Unsupported, match=r"must name modules of the encoder, such as .*got 'layer\.9'"):
        cast(tiny(), ("layer.9",))
    steps = [{"pass": "cast_half", "mode": "autocast", "keep_fp32": ["classifier"]}]
    with pytest.raises(UsageError, match="keep_fp32 goes with mode: cast"):
        from_dict(recipe(tiny(), steps))


def test_nothing_is_left_in_the_temporary_directory(tiny: Tiny, tmp_path: Path) -> None:
    data = recipe(tiny("bert"), [ONNX, {"pass": "quantize_int8"}])
    debug(from_dict(data), tmp_path, "quantize_int8")
    assert not list(Path(tempfile.gettempdir()).glob("bertopt-debug-*"))


@pytest.mark.parametrize(
    ("steps", "way"),
    [
        ([SDPA, {"pass": "pack_sequences", "row_length": 64}], "several texts: debug the same steps without pack_sequences"),
        ([SDPA, ONNX, {"pass": "convert_openvino"}], "'convert_openvino' is openvino: --stage export_onnx, which it is built from, can be debugged"),
        ([SDPA, {"pass": "build_native"}], "'build_native' is native: --stage use_sdpa, which it is built from, can be debugged"),
        ([{"pass": "build_native"}], "'build_native' is native: .* debug a stage of quantize_int8 or cast_half"),
    ],
    ids=["packed", "openvino", "native", "native alone"],
)
def test_what_cannot_be_looked_into_is_refused_at_once(steps: list[dict[str, Any]], way: str, tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=way):
        debug(from_dict(recipe(tiny(), steps)), tmp_path / "out", steps[-1]["pass"])
    assert not (tmp_path / "out").exists()


# The numbers, and the command.


def probe() -> Probe:
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    inputs = {"input_ids": np.ones((2, 3), np.int64), "attention_mask": mask}
    return Probe("2 × 3, masked_row", "masked_row", inputs, mask.astype(bool), np.array([True, False]))


def test_only_valid_tokens_count() -> None:
    reference = np.ones((2, 3, 4), np.float32)
    got = reference.copy()
    got[0, 2] = got[1] = np.nan
    assert differ(got, reference, probe()).rel_l2 == 0
    got[0, 1, 3] = 3
    found = differ(got, reference, probe())
    assert (found.row, found.token, found.element, found.max_abs) == (0, 1, 3, 2.0)
    got[0, 0, 2] = np.inf
    found = differ(got, reference, probe())
    assert np.isnan(found.rel_l2) and (found.token, found.element) == (0, 2)
    assert differ(np.full((2, 4), 2.0), np.ones((2, 4)), probe()).rel_l2 == 1.0


def row(label: str, own: float, total: float = 0.0) -> Row:
    return Row(label=label, tensor=label, layer=0, own=own, total=total, max_abs=own, growth=None, peak=1.0, probe="p",
               row=0, token=0, token_text=None, element=0)  # fmt: skip


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ([1e-7, 1e-7, 0.3, 1e-7, 1e-7], 2),
        ([1e-3, 6e-3, 1e-3, 1e-3, 0.5], 4),
        ([1e-7, 3e-7, 1e-7, 9e-7, 1e-7], None),
        ([1e-3, 2e-3, 1e-3, 3e-3, 2e-3], None),
        ([1e-3, np.nan, np.nan, 1e-3, 9.0], 1),
    ],
)
def test_first_jump(own: list[float], named: int | None) -> None:
    rows = [row(str(i), value) for i, value in enumerate(own)]
    assert first_jump(rows) is (None if named is None else rows[named])


def test_what_breaks_in_a_free_run_is_named_where_it_begins() -> None:
    rows = [row("a", 1e-4, 1e-4), row("b", 1e-4, np.nan), row("c", np.nan, np.nan)]
    assert first_jump(rows) is rows[1]


def test_the_command_prints_tables_and_the_place(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny(), [SDPA, spoil_torch("attention.self.key.weight")])))
    with pytest.raises(SystemExit) as ended:
        main(["debug", str(file), "--stage", "spoil_torch", "--out", str(tmp_path / "out")])
    out = capsys.readouterr()
    assert ended.value.code == 0
    assert "the error jumps in: layer 1 attention" in out.out
    assert "first tensor: layer 1 · attention.self.key" in out.out and ", token " in out.out
    assert "building" in out.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--stage", "use_sdpq"], 2, "did you mean 'use_sdpa'?"),
        (["--stage", "never_here"], 4, "never_here"),
    ],
)
def test_mistakes(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tiny(), [SDPA, {"pass": "never_here"}])))
    with pytest.raises(SystemExit) as ended:
        main(["debug", str(file), *arguments, "--out", str(tmp_path / "out")])
    assert ended.value.code == code
    assert message in capsys.readouterr().err


def test_a_damaged_report_is_no_crash(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"stages": [1]}))
    with pytest.raises(UsageError, match="is not a report of bertopt"):
        debug(from_dict(recipe(tiny(), [SDPA])), tmp_path, "use_sdpa")
