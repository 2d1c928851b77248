"""A pass as others would write it: ONNX Runtime's own transformer optimizer. Workers import this module by its name."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any, cast

from bertopt.core import Context, Eager, Onnx, Pass, Result


class UseOrtOptimizer(Pass[Eager, Onnx]):
    """Export by the TorchScript exporter, on whose graphs ONNX Runtime's optimizer finds attention, and fuse.

    Without `raw_attention_mask`, the optimizer's default, a mask becomes the number of tokens before the padding: right
    as long as there is none on the left and none between.
    """

    raw_attention_mask: bool = False

    def __call__(self, model: Eager, ctx: Context) -> Result[Onnx]:
        import torch
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions

        logging.disable(logging.WARNING)
        exported, path = ctx.workdir / "exported.onnx", ctx.workdir / "onnx" / "model.onnx"
        path.parent.mkdir()
        spec, network = model.spec, cast(Any, model.network)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                network, network.example(2, 16), str(exported), dynamo=False, opset_version=17,
                input_names=list(spec.inputs), output_names=list(spec.outputs),
                dynamic_axes={name: {0: "batch", 1: "sequence"} for name in spec.inputs},
            )  # fmt: skip
        options = FusionOptions("bert")
        options.use_raw_attention_mask(self.raw_attention_mask)
        graph = optimizer.optimize_model(
            str(exported), model_type="bert", num_heads=spec.heads, hidden_size=spec.hidden,
            optimization_options=options, opt_level=0,
        )  # fmt: skip
        graph.save_model_to_file(str(path))
        exported.unlink()
        fused = graph.get_fused_operator_statistics()
        return Result(Onnx(spec, "float32", path), {"attention": int(fused["Attention"])})
