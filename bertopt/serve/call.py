"""One request on its way through the server: its model, its bounds, and what is logged of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from bertopt.errors import UsageError
from bertopt.serve.errors import ClientGone, RequestError, from_validation
from bertopt.serve.metrics import Metrics
from bertopt.serve.model import Outputs, ServedModel
from bertopt.serve.payloads import Payload
from bertopt.serve.settings import Settings
from bertopt.spec import Text

if TYPE_CHECKING:
    from starlette.requests import Request

P = TypeVar("P", bound=Payload)
T = TypeVar("T")


@dataclass(frozen=True)
class Raw:
    """The bytes of a response."""

    content: bytes
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """What all requests share."""

    models: dict[str, ServedModel]
    settings: Settings
    metrics: Metrics
    accepts: bool = True
    """False once the server began to end: it is no longer ready, and keeps no connection."""
    running: int = 0
    """Requests whose bodies are read or that wait for the model."""
    process: int = field(default_factory=os.getpid)
    """The process that opened the models."""

    def check_ready(self) -> None:
        """Raise RequestError (503) where no request would be answered, or soon none."""
        if not self.accepts:
            raise RequestError(503, "the server is ending")
        if os.getpid() != self.process:
            raise RequestError(503, "this process cannot answer; its log says why")

    def check_process(self) -> None:
        """Raise UsageError in a fork of the process that opened the models: a request would wait for ever for its threads."""
        if os.getpid() != self.process:
            raise UsageError(f"this process is a fork of the one that opened the models, {self.process}; make the application after the fork (gunicorn: without preload_app)")

    @contextlib.contextmanager
    def admitted(self, call: Call) -> Iterator[None]:
        """Count a request while it is at work. Raises RequestError (429) where as many are as may be.

        The queue bounds what waits for the model; this bounds what waits for the tokenizer and the connections, where those
        are slower.
        """
        self.check_process()
        if self.running >= self.settings.concurrent_requests:
            call.model.metrics.refuse("concurrent_requests")
            raise RequestError(429, f"{self.running} requests are at work, as many as may be; try again later", retry_after_s=1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def drain(self) -> None:
        self.accepts = False
        self.metrics.ready.set(0)


@dataclass
class Call:
    """A request for `model`, which is the first one unless the path or the payload names another."""

    request: Request
    state: State
    started: float
    model: ServedModel = field(init=False)
    texts: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.model = next(iter(self.state.models.values()))
        if (name := self.request.path_params.get("name")) is not None:
            self.choose(name)

    def choose_named(self, name: str | None) -> None:
        """Choose the model that a payload names; where one is served, any name means it. Raises RequestError as `choose` does."""
        if name is not None and len(self.state.models) > 1:
            self.choose(name)

    def choose(self, name: str) -> None:
        """Make the model `name` that of the call. Raises RequestError (404) where no model has that name."""
        models: Mapping[str, ServedModel] = self.state.models
        if name not in models:
            raise RequestError(404, f"model: expected one of {', '.join(models)}; got {ascii(name)[:100]}", "model")
        self.model = models[name]

    async def body(self) -> bytes:
        """Raises RequestError where the body is larger (413) or slower (408) than the server takes."""
        most = self.state.settings.request_bytes
        too_large = RequestError(413, f"the body must be at most {most} bytes: send fewer texts, or shorter ones")
        if (encoding := self.request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise RequestError(415, f"Content-Encoding: expected none; got {ascii(encoding)[:40]}: send the body as it is")
        declared = self.request.headers.get("content-length", "0")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.state.settings.timeout_s):
                async for part in self.request.stream():
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            late = RequestError(408, f"the body did not arrive within {self.state.settings.timeout_s:g} s")
            late.headers["Connection"] = "close"
            raise late from error
        return b"".join(parts)

    def parse(self, payload: type[P], body: bytes) -> P:
        try:
            return payload.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error

    async def outputs(self, texts: Sequence[Text], truncate: bool | None, field: str = "inputs", stride: int | None = None) -> Outputs:
        self.texts = len(texts)
        outputs = await self.model.outputs(texts, truncate, self.until, field, stride)
        self.tokens = outputs.tokens
        return outputs

    async def until(self, future: asyncio.Future[T]) -> T:
        """Return the result of `future`, which is not cancelled otherwise. Raises ClientGone where the client goes before, and
        RequestError (504) where the time is over."""
        # The body was read: all that can come is the end of the connection.
        gone = asyncio.ensure_future(self.request.receive())
        left = self.state.settings.timeout_s - (asyncio.get_running_loop().time() - self.started)
        try:
            await asyncio.wait((future, gone), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            if gone.done():
                raise ClientGone
            raise RequestError(504, f"not answered within {self.state.settings.timeout_s:g} s; the work was dropped")
        finally:
            gone.cancel()
