"""ONNX export through torch's dynamo exporter."""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from bertopt.core import Context, Eager, Onnx, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported, missing_library


class ExportOnnx(Pass[Eager, Onnx]):
    """Export to ONNX with named, shared dimensions: `batch` and `sequence`, or those of packed rows. Counts nodes.

    From opset 23 attention and GELU are single `Attention` and `Gelu` nodes; below, attention is spelled out.
    A pooled model also gives `last_hidden_state` (SPLADE: `logits`), which sentence-transformers' own loaders read, except after
    `keep_cls_only` and `pack_sequences`. Dimensions of packed rows are `rows`, `row_length` and `slots`.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "use_better_transformer": "nn.TransformerEncoder's fast path is torch's own and cannot be exported",
    }

    opset: int = Field(23, ge=18, le=23, description="ONNX opset version")

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if any(step.name() == "cast_half" and getattr(step, "mode", "") == "autocast" for step in before):
            return "autocast exists only while torch runs; use mode: cast, or cast_onnx_half after the export"
        if any(step.name() == "quantize_fp8" for step in before):
            return "the fp8 products are torch's; branch with after: from the network before quantize_fp8"
        if any(getattr(step, "attention", None) == "varlen" for step in before):
            return "ONNX has no attention over texts of several lengths; use pack_sequences with attention: masked"
        return super().conflict(before)

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cpu" and any(getattr(step, "dtype", "") == "bfloat16" for step in before):
            return "ONNX Runtime has no bfloat16 kernels for a CPU; branch with after: from the float32 network, or say device: auto"
        return None

    def __call__(self, model: Eager, ctx: Context) -> Result[Onnx]:
        import torch

        try:
            import onnx_ir  # noqa: F401
            from onnxscript import optimizer
        except ImportError as error:
            raise missing_library("ONNX export needs onnx_ir and onnxscript", "'bertopt[cpu]'", failed=error) from error

        from bertopt.quantization import onnx_files

        network: Any = copy.copy(model.network)
        # Loaders of other software read these of a pooled model.
        network.gives_tokens = True
        if "use_better_transformer" in {rewrite.name for rewrite in model.rewrites}:
            raise Unsupported(
                "nn.TransformerEncoder's fast path is torch's own and cannot be exported; branch with after:"
            )
        named = model.spec.dimensions
        dims = {dim: torch.export.Dim(dim) for dims in named.values() for dim in dims}
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network, network.example(2, 16), dynamo=True, opset_version=self.opset, verbose=False, optimize=True,
                dynamic_shapes={"tensors": tuple({0: dims[first], 1: dims[second]} for first, second in named.values())},
                input_names=list(named), output_names=list(network.outputs),
            )  # fmt: skip
        assert program is not None
        graph = program.model
        if graph.opset_imports.get("") != self.opset:
            raise Unsupported(f"expected opset {self.opset}; the exporter wrote {graph.opset_imports.get('')}: state that one")
        _check_names(graph, model)
        # The exporter leaves those that several products share, DeBERTa's, to be transposed in each call, and quantisers pass them by.
        optimizer.fold_constants(graph, output_size_limit=sys.maxsize, should_fold=_transposes_a_weight)
        optimizer.remove_unused_nodes(graph)
        for node in graph.graph:
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
        path = onnx_files.save(graph, ctx.workdir / "onnx")
        _check_size(graph, network)
        changes = {
            "nodes": sum(1 for _ in graph.graph),
            "attention_nodes": sum(n.op_type == "Attention" for n in graph.graph),
        }
        return Result(Onnx(model.spec, model.precision, path), changes)

    def effects(self, model: Onnx, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        import onnx_ir

        graph = onnx_ir.load(model.path)
        kinds = [node.op_type for node in graph.graph]
        native = kinds.count("Attention")
        found = {"as the opset": (self.opset, graph.opset_imports.get("") or 0)}
        if self.opset >= 23 and "use_sdpa" in (facts.passes or ()):
            return {"Attention nodes": (model.spec.layers, native)} | found
        # Spelled out, every attention has one softmax; ConvBERT's has another, of its kernels.
        others = model.spec.layers if model.spec.family == "convbert" else 0
        return {"Attention nodes or softmaxes": (model.spec.layers, native + kinds.count("Softmax") - others)} | found


def _transposes_a_weight(node: Any) -> bool:
    """Whether a node transposes a weight that is read in no other way: a head may transpose the embeddings, which would be stored twice."""
    return node.op_type == "Transpose" and all(reader.op_type == "Transpose" for reader in node.inputs[0].consumers())


def _check_size(graph: Any, network: Any) -> None:
    """Refuse a graph that holds weights several times, as of layers that share theirs. A head may transpose the embeddings it shares."""
    once = {tensor.data_ptr(): tensor.nbytes for tensor in (*network.parameters(), *network.buffers())}
    found = sum(value.const_value.nbytes for value in graph.graph.initializers.values())
    if found > 1.1 * sum(once.values()) + max(once.values()) + 2**20:
        raise Unsupported(
            f"the exporter wrote {found / 2**20:.0f} MiB of weights where the network has {sum(once.values()) / 2**20:.0f}: "
            "it stored some of them several times; report this with the model's config.json"
        )


def _check_names(graph: Any, model: Eager) -> None:
    """The exporter renames what it pleases; serving code finds inputs and dimensions by name."""
    for (name, expected), value in zip(model.spec.dimensions.items(), graph.graph.inputs, strict=True):
        dims = [str(dim) for dim in value.shape or ()]
        if value.name != name or dims != [*expected]:
            raise Unsupported(f"expected input {name}[{', '.join(expected)}]; the exporter wrote {value.name}{dims}; report this with the model's config.json")
