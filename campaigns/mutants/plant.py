"""The passes that plant a mutant, and the table of mutants."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from bertopt.core import Compiled, Context, Eager, Onnx, Pass, Precision, Result
from bertopt.passes import register

Gate = Literal[
    "parity", "finite", "effects", "noop", "invariance", "ranking", "quality", "timed", "latency", "integrity", "unsupported",
    "build", "load", "rounding", "certificate", "coverage", "delivery",
]  # fmt: skip
Step = Mapping[str, Any]
Fault = Callable[..., Any]


@dataclass(frozen=True)
class Checkpoint:
    """Which tiny checkpoint a mutant is planted in."""

    family: str = "bert"
    task: str = "text-classification"
    pooling: str | None = None
    head: str = ""
    """Another head than the task's usual one, of `checkpoints.HEADS`."""


LABELS = Checkpoint()
ROBERTA = Checkpoint("roberta")
TOKENS = Checkpoint(task="token-classification")
SPAN = Checkpoint(task="question-answering")
MASK = Checkpoint(task="fill-mask")
MEAN = Checkpoint(task="feature-extraction", pooling="mean")
SPLADE = Checkpoint(task="feature-extraction", pooling="splade")
NUMBERS = Checkpoint(head="numbers")
RANKER = Checkpoint(head="ranker")
ENTITIES = Checkpoint(task="token-classification", head="entities")
TOPICS = Checkpoint(head="topics")
INTENTS = Checkpoint(head="intents")
LOW = Checkpoint(head="low")

SDPA: Step = {"pass": "use_sdpa"}
EXPORT: Step = {"pass": "export_onnx"}
#: What comes before a mutant of each form.
TORCH_LINE: tuple[Step, ...] = ()
ONNX_LINE = (SDPA, EXPORT)
INT8_LINE = (SDPA, EXPORT, {"pass": "quantize_int8"})
#: Limits of somebody who only minds what a gate behind parity measures.
LOOSE = {"max_abs": 9.0, "rel_l2": 9.0, "cosine_min": -1.0, "label_flips_max": 1.0}


@dataclass(frozen=True)
class Mutant:
    """One wrong model. `deed` is for faults that no pass can plant: it does the wrong and says what noticed."""

    name: str
    gate: Gate
    about: str
    fault: Fault
    step: str = ""
    """Name of the pass that plants it; empty for a deed."""
    on: Checkpoint = LABELS
    line: tuple[Step, ...] = ()
    claims: Precision | None = None
    """The precision it says it has, where not its parent's."""
    limits: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    """What follows it in the recipe, where one step does not do."""
    labelled: bool = False
    """Whether the recipe's texts carry labels."""

    @property
    def table(self) -> str:
        """The module that it stands in."""
        return self.fault.__module__.rpartition(".")[2]

    @property
    def deed(self) -> bool:
        return not self.step


MUTANTS: dict[str, Mutant] = {}
#: The tables of the second round, whose faults others had hidden behind what the checks did not look at.
NEW = (
    "loose_limits", "bought_claims", "unseen_inputs", "conditions", "borrowed_code", "as_read", "tampered", "other_runtimes", "almost_alike",
    "newer_families", "batch_forms", "unseen_calls", "heads", "labels", "own_passes", "reported", "outsiders", "shipped_bugs", "shipped_graphs",
    "convolution_families",
    "service_batches", "graph_constants", "resealed", "resealed_weights", "sparse", "batch_lengths",
    "bert_relatives", "unusual_rows",
)  # fmt: skip
_TABLES = ("torch_forms", "torch_inputs", "onnx_forms", "claims", "runtime", "deeds", "controls", *NEW)


def table() -> dict[str, Mutant]:
    """Every mutant by name."""
    for name in _TABLES:
        importlib.import_module(f"campaigns.mutants.{name}")
    return MUTANTS


#: What deeds and controls plant: no mutants by themselves.
PARTS: dict[str, Fault] = {}


def part(fault: Fault) -> Fault:
    PARTS[fault.__name__] = fault
    return fault


def fault_of(name: str) -> Fault:
    table()
    return PARTS[name] if name in PARTS else MUTANTS[name].fault


def claims_of(name: str) -> Precision | None:
    return table()[name].claims if name in table() else None


def mutant(
    gate: Gate, step: str, on: Checkpoint = LABELS, line: tuple[Step, ...] = (), claims: Precision | None = None,
    limits: Mapping[str, float] | None = None, steps: tuple[Step, ...] = (), labelled: bool = False,
) -> Callable[[Fault], Fault]:  # fmt: skip
    """Enter the decorated fault into the table under its own name; its docstring says what is wrong."""

    def enter(fault: Fault) -> Fault:
        name = fault.__name__
        assert name not in MUTANTS and fault.__doc__, f"{name} must have a new name and a docstring"
        about = " ".join(fault.__doc__.split())
        MUTANTS[name] = Mutant(name, gate, about, fault, step, on, line, claims, limits or {}, steps, labelled)
        return fault

    return enter


class PlantTorch(Pass[Eager, Eager]):
    """Plants a fault in the network every time the stage is opened, as a wrong rewrite would."""

    mutant: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self, precision=claims_of(self.mutant))

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        with torch.no_grad():
            fault_of(self.mutant)(network)
        return {"planted": 1}


class PlantCompiled(Pass[Eager, Compiled]):
    """Plants a fault where torch.compile should be."""

    mutant: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Compiled]:
        made = model.rewritten(self).model
        compiled = Compiled(made.spec, made.precision, made.checkpoint, made.network, made.rewrites)
        return Result(compiled, {"graphs": 1})

    def rewrite(self, network: Any) -> dict[str, int]:
        table()[self.mutant].fault(network)
        return {"modules": 1}


class PlantOnnx(Pass[Onnx, Onnx]):
    """Plants a fault in the graph."""

    mutant: str

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        import onnx_ir as ir

        graph = ir.load(model.path)
        fault_of(self.mutant)(graph)
        path = write_graph(graph, ctx)
        return Result(replace(model, path=path, precision=claims_of(self.mutant) or model.precision), {"planted": 1})


class PlantModel(Pass[Eager, Eager]):
    """Gives back whatever the fault makes of the model: `fault(model, ctx) -> Result`."""

    mutant: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return cast("Result[Eager]", fault_of(self.mutant)(model, ctx))


class PlantGraph(Pass[Onnx, Onnx]):
    """Like PlantModel for a graph."""

    mutant: str

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        return cast("Result[Onnx]", fault_of(self.mutant)(model, ctx))


def write_graph(graph: Any, ctx: Context, external: bool = False) -> Path:
    """Save a graph where a pass should."""
    import onnx_ir as ir

    path = ctx.workdir / "onnx" / "model.onnx"
    path.parent.mkdir()
    ir.save(graph, path, external_data="model.onnx_data" if external else None)
    return path


def behind(model: Onnx, ctx: Context, nodes: Callable[[str], Any], constants: Mapping[str, Any], output: int = 0) -> Result[Onnx]:
    """The graph with `nodes` behind one `output`: given the output's name, they make it of `right` and the inputs."""
    import onnx
    import onnx_ir as ir
    from onnx import numpy_helper

    graph = onnx.load(model.path)
    name_of = graph.graph.output[output].name
    for node in graph.graph.node:
        node.output[:] = ["right" if name == name_of else name for name in node.output]
        node.input[:] = ["right" if name == name_of else name for name in node.input]
    graph.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items())
    graph.graph.node.extend(nodes(name_of))
    return Result(replace(model, path=write_graph(ir.from_proto(graph), ctx)), {"planted": 1})


for _pass in (PlantTorch, PlantCompiled, PlantOnnx, PlantModel, PlantGraph):
    register(_pass)
