"""Eager and compiled torch networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from bertopt.core import Compiled, Device, Eager, RuntimeFacts, Session
from bertopt.errors import Unsupported
from bertopt.sessions.inputs import check

if TYPE_CHECKING:
    from bertopt.core import Array


class TorchSession(Session):
    def __init__(self, model: Eager | Compiled, device: Device, threads: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise Unsupported(
                "torch sees no CUDA GPU here; set device: cpu, or install the driver and a CUDA build of torch"
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self.spec = model.spec
        self.device = torch.device(device)
        self.fixed_costs = device == "cpu"
        self.network: Any = model.network.to(self.device)
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def load(self, inputs: Mapping[str, Array]) -> None:
        check(inputs, self.spec.network_inputs)
        self._inputs = tuple(torch.from_numpy(inputs[name]).to(self.device) for name in self.spec.network_inputs)

    def step(self) -> None:
        with torch.inference_mode():
            self._outputs = self.network(*self._inputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fetch(self) -> dict[str, Array]:
        return {
            name: value.float().cpu().numpy() for name, value in zip(self.spec.outputs, self._outputs, strict=False)
        }

    def facts(self) -> RuntimeFacts:
        from torch._dynamo.utils import counters

        graphs = counters["stats"].get("unique_graphs")
        return RuntimeFacts(
            runtime=f"torch {torch.__version__}", device=self.device.type, threads=torch.get_num_threads(),
            graphs=int(graphs) if graphs else None,
        )  # fmt: skip
