"""Run a session for everything that its model gives: also `Spec.token_output`, which sessions drop and other loaders read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bertopt.core import Compiled, Eager, Model, Onnx, OpenVino, Session

if TYPE_CHECKING:
    from bertopt.core import Array


def runner(session: Session, model: Model) -> Callable[[Mapping[str, Array]], Mapping[str, Array]]:
    """Return what runs a padded batch and gives every output that the model ships. Later use of `session` is as before."""
    opened: Any = session
    extra = model.spec.token_output
    if model.spec.layout != "padded" or extra in model.spec.outputs or extra not in _names(opened, model):
        return session.run
    spec = model.spec.model_copy(update={"outputs": (*model.spec.outputs, extra)})
    if isinstance(model, OpenVino):
        (request,) = opened._requests(opened.compiled, 1)
        request.spec = spec

        def openvino(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            # A batch of one may have a request made for its length, which gives the spec's outputs alone.
            return session.run(inputs) if len(inputs["input_ids"]) == 1 else dict(request.run(inputs))

        return openvino

    def wide(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        own, opened.spec = opened.spec, spec
        try:
            with _giving_tokens(model):
                return session.run(inputs)
        finally:
            opened.spec = own

    return wide


def _names(opened: Any, model: Model) -> set[str]:
    """Return the names of the outputs that the model can give."""
    if isinstance(model, OpenVino):
        return {name for output in opened.compiled.outputs for name in output.get_names()}
    if isinstance(model, Onnx):
        return {output.name for output in opened.session.get_outputs()}
    if isinstance(model, Eager | Compiled):
        network: Any = model.network
        with _giving_tokens(model):
            return set(network.outputs)
    return set()


@contextlib.contextmanager
def _giving_tokens(model: Model) -> Iterator[None]:
    """Let an eager network give its tokens' vectors, too. Any other model gives them always or never."""
    if not isinstance(model, Eager):
        yield
        return
    network: Any = model.network
    own, network.gives_tokens = network.gives_tokens, True
    try:
        yield
    finally:
        network.gives_tokens = own
