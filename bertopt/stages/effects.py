"""What a committed model shows of the pass that made it, and where a runtime really runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bertopt.core import Compiled, Eager, Model, Onnx, Rewrite, RuntimeFacts
from bertopt.passes import registry

#: Counts expected and found, by name.
Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Effects:
    """`own` is what the stage's pass says its model must show; `placed` is what holds for every pass."""

    own: Counts
    placed: Counts


def ask(model: Model, records: Sequence[Rewrite], facts: RuntimeFacts) -> Effects:
    """The effects in `model`, opened from a stage that says it was made by the passes in `records`, in order.

    `facts` is what the session says that runs it.
    """
    own: Counts = {}
    if records:
        last = registry.restore(records[-1])
        own = last.effects(model, facts.model_copy(update={"passes": tuple(record.name for record in records)}))
    placed = placement(facts) | claimed(model, facts)
    return Effects({name: (int(wanted), int(found)) for name, (wanted, found) in own.items()}, placed)


def placement(facts: RuntimeFacts) -> Counts:
    """Nodes that compute on the provider asked for, out of all that do. Runtimes move shape arithmetic on purpose."""
    nodes = facts.computing_nodes
    if not nodes or facts.provider is None:
        return {}
    return {f"computing nodes on {facts.provider}": (sum(nodes.values()), nodes.get(facts.provider, 0))}


def claimed(model: Model, facts: RuntimeFacts) -> Counts:
    """What a model must show of the precision it says it has, which sets its limits, and of being compiled."""
    shown: Counts = {}
    if model.precision != "float32" and isinstance(model, Eager | Compiled | Onnx):
        found = _in_network(model) if isinstance(model, Eager | Compiled) else _in_graph(model)
        shown[f"weight, or more, in {model.precision}"] = (1, min(1, found))
    if isinstance(model, Compiled):
        from torch._dynamo import config
        from torch._dynamo.utils import counters

        shown["compiled graph, or more"] = (1, min(1, facts.graphs or 0))
        shown["graph breaks"] = (0, sum(counters["graph_break"].values()))
        shown["compiler errors to be suppressed"] = (0, int(config.suppress_errors))
    return shown


def _in_network(model: Eager | Compiled) -> int:
    """Matrices of the network that its products take in the claimed precision, cast or autocast."""
    weights = [tensor for tensor in model.network.parameters() if tensor.dim() > 1]
    if str(getattr(model.network, "autocast_dtype", None)) == f"torch.{model.precision}":
        return len(weights)
    # float8 has several kinds: torch.float8_e4m3fn.
    return sum(str(tensor.dtype).partition("_")[0] == f"torch.{model.precision}" for tensor in weights)


def _in_graph(model: Onnx) -> int:
    """Constant matrices of the graph in the claimed precision."""
    import onnx_ir as ir

    kinds = (
        {ir.DataType.INT8, ir.DataType.UINT8} if model.precision == "int8" else {ir.DataType[model.precision.upper()]}
    )
    values = ir.load(model.path).graph.initializers.values()
    return sum(value.dtype in kinds and len(value.shape or ()) > 1 for value in values)
