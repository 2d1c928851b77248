"""torch.compile, with its graphs, breaks and recompiles counted over the shape grid."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bertopt.core import Compiled, Context, Eager, Pass, Result
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch


class CompileTorch(Pass[Eager, Compiled]):
    """Compile the forward with torch.compile (Inductor). Counts graphs over the recipe's shape grid.

    More graphs than one means recompiles: torch specialises batch or sequence 1. A graph break is refused.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="torch.compile's mode"
    )
    dynamic: bool = Field(True, description="one graph for all shapes; false compiles each shape of the grid")

    def __call__(self, model: Eager, ctx: Context) -> Result[Compiled]:
        import copy

        import torch
        from torch._dynamo.utils import counters

        if ctx.device == "cpu" and not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
            raise Unsupported(
                "torch.compile needs a C++ compiler on a CPU; install g++ (apt-get install g++) or set CXX"
            )
        network: Any = copy.deepcopy(model.network).to(ctx.device)
        torch._dynamo.reset()
        counters.clear()
        self.rewrite(network)
        with torch.inference_mode():
            for batch, sequence in ctx.shapes:
                network(*network.example(batch, sequence))
        breaks = sum(counters["graph_break"].values())
        if breaks:
            raise Unsupported(
                f"torch.compile broke the graph {breaks} times ({next(iter(counters['graph_break']))}); use the model uncompiled"
            )
        compiled = Compiled(model.spec, model.precision, model.checkpoint, network, (*model.rewrites, self.record()))
        return Result(compiled, {"graphs": int(counters["stats"]["unique_graphs"])})

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        import torch

        # Past the limit torch would quietly run eager code; raise instead.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        network.compile(mode=None if self.mode == "default" else self.mode, dynamic=self.dynamic)
        return {"modules": 1}
