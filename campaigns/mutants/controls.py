"""Changes that do no harm. They must pass every gate, or catching a mutant would prove nothing."""

from __future__ import annotations

from typing import Any

from campaigns.mutants.plant import LABELS, ONNX_LINE, Checkpoint, Step, part


@part
def leaves_a_note(network: Any) -> None:
    """Hangs an attribute on the network that nobody reads."""
    network.note = "harmless"


@part
def inserts_identity(graph: Any) -> None:
    """The ids pass through an Identity node."""
    import onnx_ir as ir

    ids = graph.graph.inputs[0]
    same = ir.node("Identity", [ids], name="same")
    same.outputs[0].name = "same_ids"
    users = [(use.node, use.idx) for use in ids.uses() if use.node is not same]
    for node, index in users:
        node.replace_input_with(index, same.outputs[0])
    graph.graph.insert_before(next(iter(graph.graph)), same)


#: Name, checkpoint and line of passes.
CONTROLS: tuple[tuple[str, Checkpoint, tuple[Step, ...]], ...] = (
    ("leaves_a_note", LABELS, ({"pass": "plant_torch", "name": "mutant", "mutant": "leaves_a_note"},)),
    ("inserts_identity", LABELS, (*ONNX_LINE, {"pass": "plant_onnx", "name": "mutant", "mutant": "inserts_identity"})),
)
