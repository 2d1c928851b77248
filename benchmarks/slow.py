"""A pass that makes a model slower by a known share, to see whether the timing finds it."""

from __future__ import annotations

import time
from typing import Any

from bertopt.core import Context, Eager, Pass, Result
from bertopt.passes import register


@register
class BusyWait(Pass[Eager, Eager]):
    """After each run, spin for `share` of the time that it took."""

    share: float = 0.05

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        run = network.forward

        def forward(*inputs: Any) -> Any:
            start = time.perf_counter()
            answers = run(*inputs)
            end = time.perf_counter()
            while time.perf_counter() < end + self.share * (end - start):
                pass
            return answers

        network.forward = forward
        return {"networks": 1}
