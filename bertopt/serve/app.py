"""The ASGI application: routes, keys, errors, metrics and one line of log for each request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from bertopt.serve import cohere, info, kserve, openai, openapi, tei, traces
from bertopt.serve.call import Call, Raw, State
from bertopt.serve.errors import ClientGone, RequestError, body
from bertopt.serve.metrics import Metrics
from bertopt.serve.model import ServedModel
from bertopt.serve.payloads import Documents, OpenAiEmbeddings, Payload
from bertopt.serve.settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_access, _log = logging.getLogger("bertopt.access"), logging.getLogger("bertopt.serve")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
#: The status that proxies log for a client that went away; nobody receives it.
CLIENT_GONE = 499
Handler = Callable[["Request"], Awaitable["Response"]]

#: What reads a body itself; others without a payload read none.
READ_BODY = (tei.root, kserve.infer)
#: A model of KServe's, by name alone or with its version.
KSERVE = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")


def create(models: dict[str, Path], settings: Settings) -> Starlette:
    """Open every artefact, warm it up, and return the application. Raises what `bertopt.load` raises."""
    from starlette.applications import Starlette

    metrics = Metrics()
    served = {name: ServedModel(name, directory, settings, metrics) for name, directory in models.items()}
    state = State(served, settings, metrics)
    metrics.ready.set(1)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state.check_process()
        yield
        state.drain()
        for model in served.values():
            await asyncio.to_thread(model.close)

    app = Starlette(routes=_routes(state), lifespan=lifespan)
    app.state.bertopt = state
    return app


def _routes(state: State) -> list[Any]:
    from starlette.routing import Route

    def get(path: str, answer: Callable[[Call], Awaitable[Any]], key: bool = True) -> Route:
        return Route(path, _handler(state, path, answer, None, key), methods=["GET"])

    def post(path: str, answer: Callable[..., Awaitable[Any]], payload: type[Payload] | None) -> Route:
        return Route(path, _handler(state, path, answer, payload), methods=["POST"])

    routes = [post(prefix + path, *row) for prefix in ("", "/models/{name}") for path, row in tei.ROUTES.items()]
    return [
        *routes,
        post("/", tei.root, None),
        get("/info", info.info), get("/models/{name}/info", info.info),
        get("/health", _health, key=False), get("/metrics", _metrics, key=False),
        get("/openapi.json", openapi.document),
        post("/v1/embeddings", openai.embeddings, OpenAiEmbeddings), get("/v1/models", openai.models),
        get("/v1/models/{name}", openai.model), *(post(f"/{version}/rerank", cohere.rerank, Documents) for version in ("v1", "v2")),
        get("/v2", kserve.server), get("/v2/health/live", _live, key=False), get("/v2/health/ready", _health, key=False),
        *(get(path, kserve.metadata) for path in KSERVE), *(get(f"{path}/ready", kserve.ready) for path in KSERVE),
        *(post(f"{path}/infer", kserve.infer, None) for path in KSERVE),
        Route("/{path:path}", _handler(state, "other", _unknown, None), methods=[]),  # none stands for all
    ]  # fmt: skip


async def _unknown(call: Call) -> Any:
    from starlette.routing import Match, Route

    others = [route for route in call.request.app.routes if route.matches(call.request.scope)[0] is Match.PARTIAL]
    methods = {method for route in others if isinstance(route, Route) for method in route.methods or ()}
    if not methods:
        raise RequestError(404, "no such route; /openapi.json lists them")
    error = RequestError(405, f"this route takes {' or '.join(sorted(methods - {'HEAD'}))}; got {call.request.method}")
    error.headers["Allow"] = ", ".join(sorted(methods))
    raise error


async def _live(call: Call) -> Any:
    return None


async def _health(call: Call) -> Any:
    call.state.check_ready()


async def _metrics(call: Call) -> Any:
    return Raw(call.state.metrics.scrape(), "text/plain; version=0.0.4")


def _handler(
    state: State, route: str, answer: Callable[..., Awaitable[Any]], payload: type[Payload] | None, key: bool = True
) -> Handler:
    """Return the endpoint of a route: `answer` gets the call and, by the method, the checked payload or the raw body."""
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response

    async def result(request: Request, started: float, log: dict[str, Any]) -> Any:
        if key:
            _check_key(request, state.settings.api_key)
        call = Call(request, state, started)
        try:
            if payload is None and answer not in READ_BODY:
                return await answer(call)
            with state.admitted(call):
                data = await call.body()
                return await answer(call, data if payload is None else call.parse(payload, data))
        except ClientDisconnect as error:
            raise ClientGone from error
        finally:
            log.update({"model": call.model.name, "texts": call.texts, "tokens": call.tokens} if call.texts else {})

    async def endpoint(request: Request) -> Response:
        started, loop_time = time.perf_counter(), asyncio.get_running_loop().time()
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        log: dict[str, Any] = {}
        path: str = request.scope["path"]  # request.url depends on the Host header, which may be anything
        status, reply = await _replied(result(request, loop_time, log), state, path, request_id)
        headers = {"X-Request-Id": request_id, **reply.headers, **({} if state.accepts else {"Connection": "close"})}
        seconds = time.perf_counter() - started
        state.metrics.requests.labels(route, str(status)).inc()
        state.metrics.request_seconds.labels(route).observe(seconds)
        traces.describe(request.scope, request_id, log)
        if _access.isEnabledFor(logging.INFO):
            client = request.client.host if request.client else None
            _access.info(json.dumps({"time": round(time.time(), 3), "request_id": request_id, "client": client, "method": request.method,
                                     "path": path[:200], "status": status, "ms": round(seconds * 1e3, 3), **log}))  # fmt: skip
        return Response(reply.content, status, headers, reply.media if reply.content else None)

    return endpoint


async def _replied(result: Awaitable[Any], state: State, path: str, request_id: str) -> tuple[int, Raw]:
    """Return the status and reply of a result, or of the error that it ends in. Raises CancelledError while the server goes on."""
    try:
        value = await result
        return 200, value if isinstance(value, Raw) else Raw(b"" if value is None else _json(value))
    except RequestError as known:
        error = known
    except ClientGone:
        return CLIENT_GONE, Raw(b"")
    except asyncio.CancelledError:
        if state.accepts:
            raise
        # The time to end is over.
        error = RequestError(503, "the server ended before it had answered; send the request again")
    except Exception:
        _log.exception("request %s failed", request_id)
        error = RequestError(500, f"the server failed on request {request_id}; its log says why")
    return error.status, Raw(_json(body(path, error)), headers=error.headers)


def _check_key(request: Request, key: str | None) -> None:
    if key is None:
        return
    given = request.headers.get("authorization", "")
    scheme, _, token = given.partition(" ")
    # Headers are bytes, which Starlette reads as Latin-1. A key from a file often ends in a line break, which no header can hold.
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), key.strip().encode()):
        error = RequestError(401, "this server wants 'Authorization: Bearer KEY'")
        error.headers["WWW-Authenticate"] = "Bearer"
        raise error


def _json(value: Any) -> bytes:
    """Outputs are finite here, see `ServedModel.outputs`: what orjson writes for NaN is null. Arrays of float32 are written in as
    few digits as give the same float32 again."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
