"""One OpenVINO request: arrays in, whole blocks of tokens run, answers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.core import Spec
from bertopt.sessions.inputs import check_int32

if TYPE_CHECKING:
    from bertopt.core import Array

#: Attention sums over the tokens in blocks of this many, and in another order over what is left: 1e-7 that may flip an INT8
#: rounding, and then an answer by 5e-3. In whole blocks, a padded text's answer is the same to the last bit beside any
#: others. And the first run of a shape costs 25 ms of preparation at MiniLM's size, so the fewer shapes the better.
BLOCK = 16


def widens(spec: Spec, inputs: Mapping[str, Array]) -> bool:
    """Whether padding may be added to a batch: not where a head that reads the first token of a row reads padding there.

    What a family computes of padding may depend on how much there is: DeBERTa-v2 lets it attend evenly to everything.
    """
    if spec.layout == "packed" or spec.granularity != "text":
        return True
    return bool(inputs["attention_mask"][:, 0].all())


class Request:
    """Runs one batch at a time. `request` is the runtime's, `tensor` its class of tensors."""

    def __init__(self, request: Any, tensor: Any, spec: Spec) -> None:
        self.request, self.spec, self._tensor = request, spec, tensor
        #: Tokens of a row as it came, and what the runtime reads until it has run.
        self._width = 0
        self._held: list[Array] = []

    def set(self, inputs: Mapping[str, Array]) -> None:
        """Hand the arrays over, uncopied where their length allows."""
        check_int32(inputs, self.spec)
        rows, self._width = inputs["input_ids"].shape
        missing = -self._width % BLOCK
        if self.spec.layout == "padded":
            missing = min(missing, self.spec.max_length - self._width) if widens(self.spec, inputs) else 0
        self._held = []
        for name in self.spec.network_inputs:
            array = inputs[name]
            if missing > 0 and name != "first_tokens":
                array = np.empty((rows, self._width + missing), np.int64)
                self._fill(array, name, inputs[name])
            self._held.append(np.ascontiguousarray(array))
            self.request.set_tensor(name, self._tensor(self._held[-1], shared_memory=True))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.set(inputs)
        self.request.infer()
        return self.answers()

    def answers(self) -> dict[str, Array]:
        """Float32, of the tokens as they came."""
        return {name: self._own(self.request.get_tensor(name).data) for name in self.spec.outputs}

    def _own(self, value: Array) -> Array:
        if self.spec.granularity != "text":
            value = value[:, : self._width]
        return np.array(value, dtype=np.float32)

    def _fill(self, array: Array, name: str, values: Array) -> None:
        width = values.shape[1]
        array[:, :width] = values
        array[:, width:] = self.spec.pad_id if name == "input_ids" else 0


class Short(Request):
    """A request of a model compiled for one row of `length` tokens: its tensors are bound once and copied into."""

    def __init__(self, request: Any, tensor: Any, spec: Spec, length: int) -> None:
        super().__init__(request, tensor, spec)
        self._arrays = {
            name: np.zeros((1, 1 if name == "first_tokens" else length), np.int64) for name in spec.network_inputs
        }
        for name, array in self._arrays.items():
            request.set_tensor(name, tensor(array, shared_memory=True))
        self._answers = {name: request.get_tensor(name).data for name in spec.outputs}

    def set(self, inputs: Mapping[str, Array]) -> None:
        check_int32(inputs, self.spec)
        self._width = inputs["input_ids"].shape[1]
        for name, array in self._arrays.items():
            self._fill(array, name, inputs[name])

    def answers(self) -> dict[str, Array]:
        return {name: self._own(value) for name, value in self._answers.items()}
