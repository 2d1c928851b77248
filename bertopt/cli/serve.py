"""`bertopt serve`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from bertopt.cli.app import Key, Verbose, app, exit_codes
from bertopt.serve.settings import Settings, as_bytes, named

_D = Settings()
#: Where the key may stand, too.
_KEY = "BERTOPT_API_KEY"


@app.command()
def serve(
    directories: Annotated[list[str], typer.Argument(help="Artefacts: DIR, or NAME=DIR.", metavar="DIR")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = _D.host,
    port: Annotated[int, typer.Option(help="Port to listen on.")] = _D.port,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that requests must carry (Authorization: Bearer).", envvar=_KEY, show_default=False),
    ] = None,
    queue_tokens: Annotated[int, typer.Option(help="Most tokens that wait; more get 429.")] = _D.queue_tokens,
    concurrent_requests: Annotated[int, typer.Option(help="Most requests in progress; more get 429.")] = _D.concurrent_requests,
    request_texts: Annotated[int, typer.Option(help="Most texts of one request; more get 422.")] = _D.request_texts,
    request_mb: Annotated[float, typer.Option(help="Largest body of a request [MB]; larger ones get 413.")] = _D.request_bytes / 10**6,
    timeout: Annotated[float, typer.Option(help="Seconds to answer a request in; later ones get 504.")] = _D.timeout_s,
    cache_mb: Annotated[float, typer.Option(help="Size of the cache of outputs [MB]; 0: no cache.")] = 0,
    truncate: Annotated[bool, typer.Option(help="Truncate long texts, unless the request says otherwise.")] = _D.truncate,
    drain: Annotated[float, typer.Option(help="Seconds after SIGTERM in which the server is not ready but still accepts requests.")] = _D.drain_s,
    grace: Annotated[float, typer.Option(help="Seconds that accepted requests may take after that.")] = _D.grace_s,
    threads: Annotated[int | None, typer.Option(help="Threads of each model; by default as many as the cores and the CPU quota allow.")] = None,
    streams: Annotated[int | None, typer.Option(help="Batches of each model that run at once; by default what suits its runtime.")] = None,
    warm_up: Annotated[bool, typer.Option(help="Run texts before the first request.")] = True,
    key: Key = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="'warning' leaves out the access log.")] = "info",
    verbose: Verbose = False,
) -> None:
    """Serve artefacts over HTTP. With the routes of text-embeddings-inference, OpenAI and KServe.

    Verifies the files first. On SIGTERM it answers every accepted request, then ends.
    """
    with exit_codes(verbose):
        from bertopt.serve.server import serve as run

        if api_key is None and _KEY in os.environ:
            api_key = ""  # which typer takes for none, and would leave the server open to all: Settings refuses it
        settings = Settings(
            host=host, port=port, queue_tokens=queue_tokens, concurrent_requests=concurrent_requests, request_texts=request_texts,
            request_bytes=as_bytes(request_mb), timeout_s=timeout, cache_bytes=as_bytes(cache_mb), truncate=truncate, api_key=api_key,
            drain_s=drain, grace_s=grace,
            threads=threads, streams=streams, warm_up=warm_up, key=key,
        )  # fmt: skip
        run(named(directories), settings, log_level)
