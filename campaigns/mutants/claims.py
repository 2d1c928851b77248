"""Passes that say what is not so: about precision, about work done, about the model's specification."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertopt.core import Context, Eager, Onnx, Result
from campaigns.mutants.controls import inserts_identity
from campaigns.mutants.plant import INT8_LINE, ONNX_LINE, ROBERTA, Checkpoint, mutant, write_graph

Made = Result[Eager]


def respecified(model: Eager, **fields: Any) -> Made:
    """The same network under another specification."""
    return Result(replace(model, spec=model.spec.model_copy(update=fields)), {"fields": len(fields)})


@mutant("noop", "plant_torch")
def does_nothing(network: Any) -> None:
    """Changes nothing and counts one change."""


@mutant("noop", "plant_onnx", line=ONNX_LINE)
def does_nothing_to_a_graph(graph: Any) -> None:
    """Writes the same graph again and counts one change."""


@mutant("noop", "plant_model")
def counts_nothing(model: Eager, ctx: Context) -> Made:
    """Changes nothing and says so."""
    return Result(replace(model), {"planted": 0})


@mutant("noop", "plant_model")
def gives_back_its_input(model: Eager, ctx: Context) -> Made:
    """Returns the very model it was given and counts three changes."""
    return Result(model, {"planted": 3})


@mutant("effects", "plant_torch", claims="bfloat16")
def half_not_done(network: Any) -> None:
    """Claims bfloat16; the weights are float32."""
    network.claims = "bfloat16"


@mutant("parity", "plant_torch")
def half_not_told(network: Any) -> None:
    """Casts the encoder to bfloat16 and still claims float32."""
    import torch

    network.encoder.to(torch.bfloat16)


@mutant("effects", "plant_onnx", line=ONNX_LINE, claims="float16")
def graph_half_not_done(graph: Any) -> None:
    """Claims float16; the graph is float32 with one node more."""
    inserts_identity(graph)


@mutant("parity", "plant_graph", line=ONNX_LINE)
def graph_half_not_told(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Casts the graph to float16 and still claims float32."""
    from bertopt.passes import CastOnnxHalf

    made = CastOnnxHalf(dtype="float16")(model, ctx)
    return replace(made, model=replace(made.model, precision="float32"))


@mutant("effects", "plant_onnx", line=ONNX_LINE, claims="int8")
def int8_not_done(graph: Any) -> None:
    """Claims INT8; no product is quantised."""
    inserts_identity(graph)


@mutant("parity", "plant_graph", line=ONNX_LINE)
def int8_not_told(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Quantises with scales of the whole batch and still claims float32."""
    from bertopt.passes import QuantizeInt8

    made = QuantizeInt8()(model, ctx)
    return replace(made, model=replace(made.model, precision="float32"))


@mutant("parity", "plant_model")
def stale_weights(model: Eager, ctx: Context) -> Made:
    """The weights are those of another training run."""
    from campaigns.mutants.checkpoints import write

    other = write(Path(tempfile.mkdtemp(prefix="bertopt-stale-")), Checkpoint(), seed=1)
    return Result(replace(model, checkpoint=other), {"weights": 1})


@mutant("build", "plant_model")
def reordered_labels(model: Eager, ctx: Context) -> Made:
    """The configuration's labels are in another order; the logits are right."""
    return respecified(model, labels=model.spec.labels[::-1])


@mutant("build", "plant_model")
def truncated_texts(model: Eager, ctx: Context) -> Made:
    """Texts are cut after 16 tokens before the model sees them."""
    return respecified(model, text_length=16)


@mutant("build", "plant_model", on=ROBERTA)
def wrong_pad_id(model: Eager, ctx: Context) -> Made:
    """Texts are padded with a word: RoBERTa numbers its positions by the padding token."""
    return respecified(model, pad_id=model.spec.pad_id + 5)


@mutant("build", "plant_graph", line=ONNX_LINE)
def wrong_form(model: Onnx, ctx: Context) -> Result[Any]:
    """Gives a torch model where it declares a graph."""
    return Result(Eager(model.spec, "float32", model.path.parent, network=None), {"nodes": 1})  # type: ignore[arg-type]


@mutant("parity", "plant_graph", line=INT8_LINE)
def fewer_decimals(model: Onnx, ctx: Context) -> Result[Onnx]:
    """Already quantised weights are quantised again, to 3 bits."""
    import numpy as np
    import onnx_ir as ir

    graph = ir.load(model.path)
    for name, value in graph.graph.initializers.items():
        array = value.const_value.numpy()
        if array.dtype == np.int8 and array.ndim == 2:
            value.const_value = ir.tensor((array // 32 * 32).astype(np.int8), name=name)
    return Result(replace(model, path=write_graph(graph, ctx)), {"weights": 1})
