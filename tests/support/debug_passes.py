"""Passes that spoil one layer, and a checkpoint that overflows float16. Workers import this module by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertopt.core import Context, Eager, Onnx, Pass, Result
from bertopt.errors import Unsupported
from bertopt.passes import register


@register
class SpoilTorch(Pass[Eager, Eager]):
    """Scales one weight matrix of the network."""

    weight: str
    by: float = 1.5

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        with torch.no_grad():
            network.get_parameter(self.weight).mul_(self.by)
        return {"weights": 1}


@register
class SpoilOnnx(Pass[Onnx, Onnx]):
    """Scales the constant that the graph's node number `nth` of type `op` reads second."""

    op: str = "MatMul"
    nth: int
    by: float = 1.5

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        import onnx_ir as ir

        graph = ir.load(model.path)
        nodes = [node for node in graph.graph if node.op_type == self.op and node.inputs[1].const_value is not None]
        if self.nth >= len(nodes):
            raise Unsupported(f"spoil_onnx takes at least {self.nth + 1} nodes {self.op} with a constant; got {len(nodes)}")
        value = nodes[self.nth].inputs[1]
        array = value.const_value.numpy()
        # INT8 weights cannot be scaled; another order of the rows is as wrong.
        spoilt = array[::-1].copy() if array.dtype.kind in "iu" else (array * self.by).astype(array.dtype)
        own = ir.val(f"{value.name}_spoilt", const_value=ir.tensor(spoilt))
        graph.graph.register_initializer(own)
        nodes[self.nth].replace_input_with(1, own)
        path = ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        ir.save(graph, path)
        return Result(Onnx(model.spec, model.precision, path), {"weights": 1})


@register
class ForgetNames(Pass[Onnx, Onnx]):
    """Renames every value a node computes, answers excepted, and drops what the nodes record."""

    def __call__(self, model: Onnx, ctx: Context) -> Result[Onnx]:
        import onnx_ir as ir

        graph = ir.load(model.path)
        for number, node in enumerate(graph.graph):
            node.metadata_props.clear()
            for value in node.outputs:
                if value not in graph.graph.outputs:
                    value.name = f"v{number}_{value.index()}"
        path = ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        ir.save(graph, path)
        return Result(Onnx(model.spec, model.precision, path), {"names": 1})


def overflow(checkpoint: Path, layer: int = 1) -> None:
    """Make one layer of a tiny BERT attend to values beyond 65504, scaled down again after: no answer changes.

    A power of two changes no digit in float32. The weights fit into float16, what is computed with them does not.
    (ONNX Runtime's CPU kernels take float16 in attention; most others compute in float32 without saying so.)
    """
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    value = next(name for name in tensors if name.endswith(f"layer.{layer}.attention.self.value.weight"))
    tensors[value] *= 2.0**16
    tensors[value.replace("weight", "bias")] *= 2.0**16
    tensors[value.replace("self.value", "output.dense")] *= 2.0**-16
    save_file(tensors, path, metadata={"format": "pt"})


def outlier(checkpoint: Path, layer: int = 1) -> None:
    """Let one channel of what a layer attends to be 2048 times as large, and its weights after that as much smaller.

    A power of two changes no digit in float32. One scale of 8 bits for all channels leaves nothing of the others.
    """
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    value = next(name for name in tensors if name.endswith(f"layer.{layer}.attention.self.value.weight"))
    tensors[value][0] *= 2.0**11
    tensors[value.replace("weight", "bias")][0] *= 2.0**11
    tensors[value.replace("self.value", "output.dense")][:, 0] *= 2.0**-11
    save_file(tensors, path, metadata={"format": "pt"})
