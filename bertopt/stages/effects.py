"""What a committed model shows of the pass that made it, and where a runtime really runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bertopt.core import Compiled, Model, Rewrite, RuntimeFacts
from bertopt.passes import registry
from bertopt.stages import claims

#: Counts expected and found, by name.
Counts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Effects:
    """`own` is what the stage's pass says its model must show; `placed` is what holds for every pass."""

    own: Counts
    placed: Counts
    proven: float | None
    """Share of the weights that is in the claimed precision: see `claims`."""


def ask(model: Model, records: Sequence[Rewrite], facts: RuntimeFacts) -> Effects:
    """The effects in `model`, opened from a stage that says it was made by the passes in `records`, in order.

    `facts` is what the session says that runs it.
    """
    own: Counts = {}
    if records:
        last = registry.restore(records[-1])
        with registry.at_work(last):
            shown = last.effects(model, facts.model_copy(update={"passes": tuple(record.name for record in records)}))
            own = {name: (int(wanted), int(found)) for name, (wanted, found) in shown.items()}
    proven = claims.proven(model, facts)
    placed = placement(facts) | claimed(model, facts, proven)
    return Effects(own, placed, proven)


def placement(facts: RuntimeFacts) -> Counts:
    """Nodes that compute on the provider asked for, out of all that do. Runtimes move shape arithmetic on purpose."""
    nodes = facts.computing_nodes
    if not nodes or facts.provider is None:
        return {}
    return {f"computing nodes on {facts.provider}": (sum(nodes.values()), nodes.get(facts.provider, 0))}


def claimed(model: Model, facts: RuntimeFacts, proven: float | None) -> Counts:
    """What a model must show of the precision it says it has, and of being compiled."""
    shown: Counts = {}
    if proven is not None:
        shown[f"at least one weight in {model.precision}"] = (1, int(proven > 0))
    if isinstance(model, Compiled):
        from torch._dynamo import config
        from torch._dynamo.utils import counters

        shown["at least one compiled graph"] = (1, min(1, facts.graphs or 0))
        shown["graph breaks"] = (0, sum(counters["graph_break"].values()))
        shown["compiler errors that are suppressed"] = (0, int(config.suppress_errors))
    return shown

