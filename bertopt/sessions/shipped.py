"""Run a session for everything that its model gives: also `last_hidden_state`, which sessions drop and other loaders read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bertopt.core import Compiled, Eager, Model, Onnx, OpenVino, Session

if TYPE_CHECKING:
    from bertopt.core import Array

HIDDEN = "last_hidden_state"


def runner(session: Session, model: Model) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    """Return what runs a padded batch and gives every output that the model ships. Later use of `session` is as before."""
    opened: Any = session
    if model.spec.layout != "padded" or HIDDEN in model.spec.outputs:
        return session.run
    spec = model.spec.model_copy(update={"outputs": (*model.spec.outputs, HIDDEN)})
    if isinstance(model, OpenVino):
        if not any(HIDDEN in output.get_names() for output in opened.compiled.outputs):
            return session.run
        (request,) = opened._requests(opened.compiled, 1)
        request.spec = spec

        def openvino(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            # A batch of one may have a request made for its length, which gives the spec's outputs alone.
            return session.run(inputs) if len(inputs["input_ids"]) == 1 else dict(request.run(inputs))

        return openvino
    names: list[str] = []
    if isinstance(model, Eager | Compiled):
        network: Any = model.network
        own, network.gives_tokens = network.gives_tokens, network.gives_tokens or isinstance(model, Eager)
        names = list(network.outputs)
        network.gives_tokens = own
    elif isinstance(model, Onnx):
        names = [output.name for output in opened.session.get_outputs()]
    if HIDDEN not in names:
        return session.run

    def wide(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        own, opened.spec = opened.spec, spec
        network: Any = model.network if isinstance(model, Eager) else None
        if network is not None:
            before, network.gives_tokens = network.gives_tokens, True
        try:
            return session.run(inputs)
        finally:
            opened.spec = own
            if network is not None:
                network.gives_tokens = before

    return wide
