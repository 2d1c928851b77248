"""ONNX graphs on disk: `model.onnx`, with large weights beside it in `model.onnx_data`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

MODEL, DATA = "model.onnx", "model.onnx_data"
#: protobuf cannot hold more than 2 GiB; above this the weights go to external data.
INLINE_BYTES = 1_800_000_000


def save(graph: Any, folder: Path) -> Path:
    """Write the model `graph` to `folder`, every matrix once, and return its path. Replaces what the folder held.

    ALBERT's layers share their weights, which the exporter transposes and writes once a layer.
    """
    import onnx_ir

    share_matrices(graph.graph)
    size = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / DATA).exists():
        # The graph may still read its weights from there, and some writers append.
        graph = onnx_ir.external_data.load_to_model(graph)
        (folder / DATA).unlink()
    onnx_ir.save(graph, folder / MODEL, external_data=DATA if size > INLINE_BYTES else None)
    return folder / MODEL


def share_matrices(graph: Any) -> int:
    """Let constant matrices of equal content be one initialiser; return how many were dropped."""
    first: dict[tuple[Any, tuple[Any, ...], bytes], Any] = {}
    before = len(graph.initializers)
    for name, value in list(graph.initializers.items()):
        if value.const_value is None or len(value.shape or ()) < 2 or value.is_graph_input() or value.is_graph_output():
            continue
        content = hashlib.sha256(value.const_value.tobytes()).digest()
        kept = first.setdefault((value.dtype, tuple(value.const_value.shape), content), value)
        if kept is not value:
            value.replace_all_uses_with(kept)
            del graph.initializers[name]
    return before - len(graph.initializers)
