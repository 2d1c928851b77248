"""Effects: what a committed model shows of its last pass, and where and in which precision the runtime really runs it."""

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
    """`own` are the effects that the stage's pass names; `placed` those that do not depend on the pass."""

    own: Counts
    placed: Counts
    proven: float | None
    """Share of the weights in the claimed precision: see `claims`."""


def ask(model: Model, records: Sequence[Rewrite], facts: RuntimeFacts) -> Effects:
    """Return the effects that `model` shows; `records` are the passes that made its stage, in order, and `facts` its session's."""
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
    """Return how many of the computing nodes run on the requested provider. Arithmetic on shapes is not counted: runtimes move it on purpose."""
    nodes = facts.computing_nodes
    if not nodes or facts.provider is None:
        return {}
    return {f"computing nodes on {facts.provider}": (sum(nodes.values()), nodes.get(facts.provider, 0))}


def claimed(model: Model, facts: RuntimeFacts, proven: float | None) -> Counts:
    """Return the effects of the precision that a model claims, and of compilation."""
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

