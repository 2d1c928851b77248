"""torch.compile, with its graphs, breaks and recompiles counted over the shape grid."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bertopt.core import Compiled, Context, Eager, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.system.compilers import check_compiler

if TYPE_CHECKING:
    import torch


#: [B, S] run to see that one graph serves all. The first is for whoever compiled for batches of one only.
_UNSEEN = ((2, 6), (3, 13), (7, 5))


_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class CompileTorch(Pass[Eager, Compiled]):
    """Compile the forward with torch.compile (Inductor). Counts graphs over the recipe's shape grid.

    More graphs than one means recompiles: torch specialises a batch of one. A sequence of one token is run with a padding
    token beside it, since torch would specialise that too. A graph break is refused.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="torch.compile's mode"
    )
    dynamic: bool = Field(True, description="one graph for all shapes; false compiles each shape of the grid")

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if self.mode in _GRAPH_MODES and any(step.name() == "capture_graphs" for step in before):
            return f"capture_graphs captures the forward itself; got mode: {self.mode}: use max-autotune-no-cudagraphs or default"
        return super().conflict(before)

    def __call__(self, model: Eager, ctx: Context) -> Result[Compiled]:
        import torch
        from torch._dynamo.utils import counters

        check_compiler(ctx.device)
        if ctx.device == "cuda" and self.mode in _GRAPH_MODES and _release(torch.__version__) < (2, 13):
            raise Unsupported(
                f"before torch 2.13 the CUDA graphs of mode: {self.mode} belong to one thread, and a predictor is called by "
                f"several; got torch {torch.__version__}: upgrade it, or use mode: max-autotune-no-cudagraphs"
            )
        network: Any = copy.deepcopy(model.network).to(ctx.device)
        torch._dynamo.reset()
        counters.clear()
        self.rewrite(network)
        if self.dynamic:
            network.tune()  # as a session does: the same sizes are tuned for once
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

        from bertopt.modeling.network import UNTUNED

        # Past the limit torch would quietly run eager code; raise instead.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        how: dict[str, Any] = {"options": UNTUNED} if self.mode == "default" else {"mode": self.mode}
        network.compile(**how, dynamic=self.dynamic)
        return {"modules": 1}

    def effects(self, model: Compiled, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """A compiled forward, nothing left to eager code and, where `dynamic`, no graph more for a shape not seen.

        How many graphs there are depends on the parity probes: torch makes a further one for a batch of one.
        """
        import torch
        from torch._dynamo.utils import counters

        network: Any = model.network
        compiled = int(network._compiled_call_impl is not None)
        found = {
            "compiled forward": (1, compiled),
            "graph, or more": (1, min(1, facts.graphs or 0)),
            "graph breaks": (0, sum(counters["graph_break"].values())),
            "frames left to eager code": (0, counters["frames"]["total"] - counters["frames"]["ok"]),
        }
        if compiled and self.dynamic:
            seen: list[int] = []
            for batch, sequence in _UNSEEN:
                with torch.inference_mode():  # as a session makes its inputs: others have another graph
                    network(*network.example(batch, min(sequence, model.spec.max_length)))
                seen.append(int(counters["stats"]["unique_graphs"]))
            found["graphs for shapes not seen before"] = (0, seen[-1] - seen[0])
        return found


def _release(version: str) -> tuple[int, ...]:
    """`2.13.0+cu130` as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
