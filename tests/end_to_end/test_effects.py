"""What committed models show of their passes: it holds for every pass, and is missed where a stage was tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bertopt
from bertopt import stages
from bertopt.core import Compiled, Context, Eager, Engine, Model, Onnx, Pass, Result, RuntimeFacts
from bertopt.modeling import checkpoint
from bertopt.passes import (
    BuildTensorrt,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ExportOnnx,
    FuseOrt,
    QuantizeInt8,
    UseBetterTransformer,
    UseSdpa,
    register,
)
from bertopt.sessions import open_session
from bertopt.stages import effects
from bertopt.stages.effects import Counts
from bertopt.stages.fingerprint import fingerprint
from tests.support.example_passes import Touch
from tests.support.exports import Exports
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import FAMILIES, Tiny

AnyPass = Pass[Any, Any]
SDPA, E23, E20 = UseSdpa(), ExportOnnx(), ExportOnnx(opset=20)


class Bench:
    """Stages by family and the passes that made them, each written and opened again as a worker does it."""

    def __init__(self, tiny: Tiny, root: Path, export: Exports) -> None:
        self.tiny, self.root, self.export = tiny, root, export
        self.built: dict[tuple[str, tuple[AnyPass, ...]], Path] = {}

    def stage(self, family: str, *steps: AnyPass) -> Path:
        if (family, steps) not in self.built:
            out = self.root / str(len(list(self.root.iterdir())))
            out.mkdir()
            if steps:
                parent = self.stage(family, *steps[:-1])
                with checkpoint.quiet():
                    model = self.export.apply(steps[-1], stages.open_stage(parent), Context(out, shapes=((2, 8), (3, 16)))).model
                stages.inherit(parent, out)
            else:
                model = checkpoint.load(self.tiny(family))
                checkpoint.write_snapshot(model, out)
            stages.write_form(model, out)
            stages.write_manifest(out, stages.describe(model))
            self.built[family, steps] = out
        return self.built[family, steps]

    def open(self, family: str, *steps: AnyPass) -> Any:
        return stages.open_stage(self.stage(family, *steps))


@pytest.fixture(scope="module")
def bench(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> Iterator[Bench]:
    root, threads = tmp_path_factory.mktemp("bench"), torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(tiny, root, export)
    torch.set_num_threads(threads)
    shutil.rmtree(root)


def ask(model: Model, *steps: AnyPass, facts: RuntimeFacts | None = None) -> Counts:
    """The effects of the last step in `model`, as seen in its session unless `facts` are given."""
    said = open_session(model, threads=1).facts() if facts is None else facts
    return effects.ask(model, [step.record() for step in steps], said).own | effects.placement(said)


def missed(counts: Counts) -> set[str]:
    return {what for what, (expected, found) in counts.items() if expected != found}


ROUTES: dict[str, tuple[tuple[AnyPass, ...], set[str]]] = {
    "sdpa": ((SDPA,), {"attention calls"}),
    "sdpa_math": ((UseSdpa(backend="math"),), {"attention calls", "forward held to the 'math' kernel"}),
    "better": ((UseBetterTransformer(),), {"nn.TransformerEncoderLayer modules", "layers on the fast path"}),
    "half": ((CastHalf(),), {"encoder tensors in bfloat16"}),
    "autocast": ((SDPA, CastHalf(mode="autocast")), {"linear layers computed in bfloat16"}),
    "onnx23": ((SDPA, E23), {"Attention nodes", "as the opset"}),
    "onnx20": ((SDPA, E20), {"Attention nodes or softmaxes", "as the opset"}),
    "onnx_eager": ((E23,), {"Attention nodes or softmaxes", "as the opset"}),
    "fuse20": ((SDPA, E20, FuseOrt()), {"fused node, or more", "attention nodes"}),
    "fuse23": ((SDPA, E23, FuseOrt()), {"fused node, or more", "attention nodes"}),
    "half23": ((SDPA, E23, CastOnnxHalf()), {"weights in float16", "products in float16"}),
    "half_but": ((SDPA, E23, CastOnnxHalf(keep_fp32=("LayerNormalization", "Gemm"))),
                 {"weights in float16", "products in float16"}),
    "int8_23": ((SDPA, E23, QuantizeInt8()), {"products with INT8 weights", "products in integer kernels"}),
    "int8_20_fused": ((SDPA, E20, FuseOrt(), QuantizeInt8()),
                      {"products with INT8 weights", "products in integer kernels"}),
}  # fmt: skip


#: Families differ in their layers; what is done to graphs does not depend on them, and takes long.
EVERYWHERE = ("sdpa", "better", "half", "autocast", "fuse23")


@pytest.mark.parametrize(
    ("family", "route"),
    [(family, route) for family in FAMILIES for route in ROUTES if family == "bert" or route in EVERYWHERE],
)
def test_every_pass_shows_what_it_did(bench: Bench, family: str, route: str) -> None:
    steps, names = ROUTES[route]
    model = bench.open(family, *steps)
    found = ask(model, *steps)
    where = {"computing nodes on CPUExecutionProvider"} if isinstance(model, Onnx) else set()
    assert set(found) == names | where
    assert not missed(found), found
    assert all(expected > 0 for expected, _ in found.values())


def test_attention_that_shares_its_weights_counts_once_a_layer(bench: Bench) -> None:
    for steps in ((SDPA,), (SDPA, E23), (SDPA, E23, FuseOrt())):
        assert not missed(ask(bench.open("albert", *steps), *steps))


@pytest.mark.slow
def test_a_compiled_forward_shows_one_graph(bench: Bench) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    torch._dynamo.reset()
    step = CompileTorch()
    model = replace(bench.open("distilbert", SDPA, step), network=bench.open("distilbert", SDPA, step).network)
    session = open_session(model, threads=1)
    with torch.inference_mode():
        model.network(*model.network.example(2, 8))
    found = ask(model, SDPA, step, facts=session.facts())
    assert set(found) == {
        "compiled forward", "graph, or more", "graph breaks", "frames left to eager code", "graphs for shapes not seen before"
    }  # fmt: skip
    assert not missed(found), found

    # The same forward under a claim that it does not keep: compiled for every shape anew.
    torch._dynamo.reset()
    model.network._compiled_call_impl = None
    model.network.compile(dynamic=False)
    assert missed(ask(model, SDPA, step, facts=session.facts())) == {"graphs for shapes not seen before"}
    model.network._compiled_call_impl = None
    assert "compiled forward" in missed(ask(model, SDPA, step, facts=RuntimeFacts()))
    torch._dynamo.reset()


def test_an_engine_says_what_it_computes_in() -> None:
    model: Any = Engine.__new__(Engine)
    object.__setattr__(model, "precision", "float16")

    def ask_engine(formats: dict[str, int]) -> Counts:
        return BuildTensorrt().effects(model, RuntimeFacts(output_formats=formats))

    what = "layer output in float16, or more"
    assert ask_engine({"Half": 9, "Float": 1}) == {what: (1, 1)}
    assert ask_engine({"Row major linear FP16 format": 9}) == {what: (1, 1)}
    assert ask_engine({"Float": 10, "Int64": 2}) == {what: (1, 0)}
    assert ask_engine({}) == {}


def test_a_provider_that_runs_only_a_part(bench: Bench) -> None:
    model = bench.open("bert", SDPA, E23)
    facts = open_session(model, threads=1).facts()
    assert facts.nodes is not None and facts.computing_nodes is not None
    assert facts.nodes["CPUExecutionProvider"] > facts.computing_nodes["CPUExecutionProvider"] > 14
    facts = facts.model_copy(update={
        "provider": "CUDAExecutionProvider",
        "computing_nodes": {"CUDAExecutionProvider": 20, "CPUExecutionProvider": 2},
    })  # fmt: skip
    assert missed(ask(model, SDPA, E23, facts=facts)) == {"computing nodes on CUDAExecutionProvider"}


# Stages that were tampered with


def eager_again(network: Any) -> None:
    network.encoder.set_attn_implementation("eager")


def free_kernel(network: Any) -> None:
    network.sdpa_backend = None


def one_back(network: Any) -> None:
    next(module for module in network.encoder.modules() if isinstance(module, torch.nn.LayerNorm)).float()


def no_autocast(network: Any) -> None:
    network.autocast_dtype = None


def train_a_layer(network: Any) -> None:
    next(m for m in network.modules() if isinstance(m, torch.nn.TransformerEncoderLayer)).train()


@pytest.mark.parametrize(
    ("route", "tamper", "words"),
    [
        ("sdpa", eager_again, {"attention calls"}),
        ("sdpa_math", free_kernel, {"forward held to the 'math' kernel"}),
        ("half", one_back, {"encoder tensors in bfloat16"}),
        ("autocast", no_autocast, {"linear layers computed in bfloat16"}),
        ("better", train_a_layer, {"layers on the fast path"}),
    ],
)
def test_a_network_that_was_tampered_with(
    bench: Bench, route: str, tamper: Callable[[Any], None], words: set[str]
) -> None:
    steps, _ = ROUTES[route]
    model = bench.open("bert", *steps)
    before = fingerprint(model)
    tamper(model.network)
    assert missed(ask(model, *steps)) == words
    assert fingerprint(model) != before


def attention_spelled_out(bench: Bench) -> Path:
    path: Path = bench.open("bert", SDPA, E20).path
    return path


def float_graph(bench: Bench) -> Path:
    path: Path = bench.open("bert", SDPA, E23).path
    return path


def fused_without_attention(bench: Bench) -> Path:
    path: Path = bench.open("bert", SDPA, E23, FuseOrt()).path
    return path


@pytest.mark.parametrize(
    ("route", "planted", "words"),
    [
        ("onnx23", attention_spelled_out, {"Attention nodes", "as the opset"}),
        ("fuse23", attention_spelled_out, {"fused node, or more", "attention nodes"}),
        ("half23", float_graph, {"weights in float16", "products in float16"}),
        ("int8_23", float_graph, {"products with INT8 weights"}),
        ("int8_20_fused", fused_without_attention, {"products with INT8 weights"}),
    ],
)
def test_a_graph_that_is_another(bench: Bench, route: str, planted: Callable[[Bench], Path], words: set[str]) -> None:
    steps, _ = ROUTES[route]
    model = replace(bench.open("bert", *steps), path=planted(bench))
    assert missed(ask(model, *steps)) == words


def test_one_weight_left_in_float32(bench: Bench, tmp_path: Path) -> None:
    import onnx_ir

    steps, _ = ROUTES["half23"]
    model = bench.open("bert", *steps)
    graph = onnx_ir.load(model.path)
    gemm = next(node for node in graph.graph if node.op_type == "MatMul")
    weight = gemm.inputs[1]
    value = onnx_ir.val("left", const_value=onnx_ir.tensor(weight.const_value.numpy().astype("float32")))
    graph.graph.register_initializer(value)
    cast = onnx_ir.node("Cast", [value], {"to": onnx_ir.DataType.FLOAT16})
    gemm.prepend(cast)
    gemm.replace_input_with(1, cast.outputs[0])
    onnx_ir.save(graph, tmp_path / "model.onnx")
    found = ask(replace(model, path=tmp_path / "model.onnx"), *steps)
    assert missed(found) == {"weights in float16"}


# Fingerprints


@pytest.mark.parametrize("family", [*FAMILIES, "albert", "mpnet"])
def test_a_fingerprint_is_the_same_wherever_and_whenever_it_is_taken(bench: Bench, family: str, tmp_path: Path) -> None:
    shutil.copytree(bench.stage(family), tmp_path / "elsewhere")
    here, there = bench.open(family), stages.open_stage(tmp_path / "elsewhere")
    assert fingerprint(here) == fingerprint(there)
    before = fingerprint(here)
    with torch.inference_mode():
        here.network(*here.network.example(2, 9))
    assert fingerprint(here) == before


@pytest.mark.parametrize("route", ROUTES)
def test_every_pass_changes_the_fingerprint(bench: Bench, route: str) -> None:
    steps, _ = ROUTES[route]
    mine = fingerprint(bench.open("bert", *steps))
    assert mine == fingerprint(bench.open("bert", *steps))
    assert mine != fingerprint(bench.open("bert", *steps[:-1]))


def test_a_compiled_model_is_another_than_the_eager_one(bench: Bench) -> None:
    eager = bench.open("bert", SDPA)
    compiled = Compiled(eager.spec, eager.precision, eager.checkpoint, eager.network, eager.rewrites)
    assert fingerprint(compiled) != fingerprint(eager)


def test_a_fingerprint_sees_hooks_functions_and_single_weights(bench: Bench) -> None:
    def look(module: Any, inputs: Any) -> None: ...

    def hook(network: Any) -> None:
        network.encoder.register_forward_pre_hook(look)

    def wrap(network: Any) -> None:
        forward = network.forward
        network.forward = lambda *tensors: (forward(*tensors)[0],)

    def nudge(network: Any) -> None:
        next(network.parameters()).data[0, 0] += 1e-3

    def drop(network: Any) -> None:
        next(m for m in network.modules() if isinstance(m, torch.nn.Dropout)).train()

    def config(network: Any) -> None:
        network.base.config.layer_norm_eps = 1e-3

    seen = {fingerprint(bench.open("bert"))}
    for change in (hook, wrap, nudge, drop, config):
        model = bench.open("bert")
        change(model.network)
        seen.add(fingerprint(model))
    assert len(seen) == 6


def test_a_graph_s_fingerprint_is_of_its_content(bench: Bench, tmp_path: Path) -> None:
    import onnx_ir

    model = bench.open("bert", SDPA, E23)
    graph = onnx_ir.load(model.path)
    for number, node in enumerate(graph.graph):
        node.name = f"renamed_{number}"
    onnx_ir.save(graph, tmp_path / "model.onnx")
    assert fingerprint(replace(model, path=tmp_path / "model.onnx")) == fingerprint(model)
    norm = next(node for node in graph.graph if node.op_type == "LayerNormalization")
    norm.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", 0.5)
    onnx_ir.save(graph, tmp_path / "model.onnx")
    assert fingerprint(replace(model, path=tmp_path / "model.onnx")) != fingerprint(model)


# Verdicts


class OnlyClaim(Touch):
    """Claims three changes and makes none."""

    def rewrite(self, network: Any) -> dict[str, int]:
        return {"claimed": 3}


class OnlyPartly(Touch):
    """Says that its model shows two marks, and leaves one."""

    def effects(self, model: Eager, facts: Any) -> dict[str, tuple[int, int]]:
        return {"marks": (2, vars(model.network)["touched"])}


class SaveAgain(Pass[Onnx, Onnx]):
    """Writes the graph it was given under another name for each node, and claims a change."""

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        import onnx_ir

        graph = onnx_ir.load(model.path)
        for node in graph.graph:
            node.name = f"{node.name}_again"
        path = ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        onnx_ir.save(graph, path)
        return Result(replace(model, path=path), {"nodes": len(graph.graph)})


for _pass in (OnlyClaim, OnlyPartly, SaveAgain):
    register(_pass)


def test_claims_are_held_against_the_committed_stage(tiny: Tiny, tmp_path: Path) -> None:
    head = {"schema_version": 1, "model": str(tiny()), "device": "cpu", "inputs": {"shapes": [[2, 8]]}}
    with cheap_workers("pipeline"):
        report = bertopt.run({**head, "steps": [{"pass": "only_claim"}, {"pass": "touch"}]}, tmp_path)
        assert [stage.status for stage in report.stages] == ["ok", "noop", "skipped"]
        assert report.exit_code == 3 and report.delivered is None
        assert "claims 3 changes, but the committed model is its parent's" in str(report.reason)

        allowed = {"pass": "only_claim", "allow_noop": True}
        report = bertopt.run({**head, "steps": [allowed, {"pass": "only_partly"}]}, tmp_path)
        assert [stage.status for stage in report.stages] == ["ok", "ok", "failed"]
        assert report.exit_code == 3 and "must show 2 marks; got 1" in str(report.reason)

        steps = [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "save_again"}]
        report = bertopt.run({**head, "steps": steps}, tmp_path)
        assert [stage.status for stage in report.stages] == ["ok", "ok", "ok", "noop"]
        shown = report.stage("export_onnx")
        assert shown.changed and shown.effects["Attention nodes"] == (2, 2)
        expected, found = shown.effects["computing nodes on CPUExecutionProvider"]
        assert expected == found > 14
