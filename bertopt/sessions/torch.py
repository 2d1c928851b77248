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
        # torch.compile traces a graph of its own for sequences of one token, 10 to 20 s each; one padding token saves it.
        self._widens = isinstance(model, Compiled) and model.spec.layout == "padded" and model.spec.max_length > 1
        self._widened = False
        self._inputs: tuple[torch.Tensor, ...] = ()
        self._outputs: tuple[torch.Tensor, ...] = ()

    def load(self, inputs: Mapping[str, Array]) -> None:
        check(inputs, self.spec.network_inputs)
        self._widened = self._widens and inputs["input_ids"].shape[1] == 1
        tensors = [torch.from_numpy(inputs[name]) for name in self.spec.network_inputs]
        if self._widened:
            fill = {"input_ids": self.spec.pad_id}
            tensors = [
                torch.nn.functional.pad(tensor, (0, 1), value=fill.get(name, 0))
                for name, tensor in zip(self.spec.network_inputs, tensors, strict=True)
            ]
        self._inputs = tuple(tensor.to(self.device) for tensor in tensors)

    def step(self) -> None:
        with torch.inference_mode():
            self._outputs = self.network(*self._inputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fetch(self) -> dict[str, Array]:
        answers = {name: value.float().cpu().numpy() for name, value in zip(self.spec.outputs, self._outputs, strict=False)}
        if self._widened and self.spec.granularity != "text":
            answers = {name: value[:, :1] for name, value in answers.items()}
        return answers

    def facts(self) -> RuntimeFacts:
        from torch._dynamo.utils import counters

        graphs = counters["stats"].get("unique_graphs")
        return RuntimeFacts(
            runtime=f"torch {torch.__version__}", device=self.device.type, threads=torch.get_num_threads(),
            graphs=int(graphs) if graphs else None,
        )  # fmt: skip
