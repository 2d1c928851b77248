"""What a server refuses, and how: the API's own error shape, the field by name, never a stack."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

import bertopt
from bertopt.core import Session
from bertopt.serve import payloads
from tests.support.serving import InProcess
from tests.unit.serve.conftest import Artefact

#: (path, body, status, words of the message)
BAD: list[tuple[str, Any, int, str]] = [
    ("/embed", b"{", 400, "the body must be JSON"),
    ("/embed", b"\xff\xfe", 400, "the body must be JSON"),
    ("/embed", b"", 400, "the body must be JSON"),
    ("/embed", b'{"inputs": "\\ud800"}', 400, "surrogate"),
    ("/embed", b"[" * 5000, 400, "the body must be JSON"),
    ("/embed", [], 422, "body"),
    ("/embed", {}, 422, "inputs: field required"),
    ("/embed", {"inputs": None}, 422, "inputs"),
    ("/embed", {"inputs": []}, 422, "inputs: expected at least one text"),
    ("/embed", {"inputs": [None]}, 422, "inputs"),
    ("/embed", {"inputs": ["a", 1]}, 422, "inputs.1: input should be a valid string; got 1"),
    ("/embed", {"inputs": {"a": 1}}, 422, "inputs"),
    ("/embed", {"inputs": ["a"] * 65}, 422, "at most 64 texts; got 65"),
    ("/embed", {"inputs": "a", "truncate": "no"}, 422, "truncate"),
    ("/embed", {"inputs": "cat " * 100, "truncate": False}, 422, "inputs[0] has 102 tokens"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompt_name"),
    ("/embed", {"inputs": "a", "dimensions": 33}, 422, "dimensions: expected 1 to 32, as many as the model gives; got 33"),
    ("/embed", {"inputs": "a", "dimensions": 0}, 422, "dimensions"),
    ("/embed", {"inputs": "a", "normalize": False}, 422, "normalize"),
    ("/embed", {"inputs": "a", "truncation_direction": "left"}, 422, "truncation_direction"),
    ("/embed", {"inputs": "x" * 70_000}, 413, "at most 65536 bytes"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 422, "inputs.sentences"),
    ("/tokenize", {"inputs": []}, 422, "inputs"),
    ("/v1/embeddings", {"input": [1, 2]}, 422, "input.0: input should be a valid string; got 1: send texts: token ids are another tokenizer's (LangChain:"),
    ("/v1/embeddings", {"input": [[1, 2]]}, 422, "got [1, 2]: send texts: token ids"),
    ("/v1/embeddings", {"input": [None]}, 422, "input.0: input should be a valid string; got None"),
    ("/predict", {"inputs": {"question": "a"}}, 422, 'send a question with its context as {"question": a, "context": b}'),
    ("/predict", {"inputs": [["a"], {"text": "a", "text_pair": 1}]}, 422, "inputs.1.1: input should be a valid string; got 1"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 422, "encoding_format"),
    ("/v2/models/tiny/infer", {"inputs": []}, 422, "inputs"),
    ("/v2/models/tiny/infer", {"inputs": [{"name": "t", "shape": [1], "datatype": "FP32", "data": [1]}]}, 400, "BYTES"),
    ("/nowhere", {}, 404, "no such route"),
    ("/info", {}, 405, "this route takes GET; got POST"),
    ("/v2/models/tiny", {}, 405, "this route takes GET; got POST"),
]


@pytest.fixture(scope="module")
def server(artefact: Artefact) -> Any:
    made = InProcess({"tiny": artefact()}, request_texts=64, request_bytes=65_536, api_key="a key")
    yield made
    made.close()


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD, ids=[f"{b[0]}-{i}" for i, b in enumerate(BAD)])
def test_bad_input_is_named(server: InProcess, path: str, body: Any, status: int, words: str, caplog: Any) -> None:
    answer = server.post(path, body, Authorization="Bearer a key")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    message = error["message"] if path.startswith("/v1") else error
    assert words in message and "Traceback" not in answer.text and "/tmp" not in answer.text
    assert answer.headers["x-request-id"] and "failed" not in caplog.text


@pytest.mark.parametrize(("payload", "body"), [
    (payloads.Embed, b'{"inputs":[%s]}'), (payloads.Predict, b'{"inputs":[%s]}'), (payloads.Predict, b'{"inputs":[[%s]]}'),
    (payloads.Rerank, b'{"query":"a","texts":[%s]}'), (payloads.Similarity, b'{"inputs":{"source_sentence":"a","sentences":[%s]}}'),
    (payloads.Tokenize, b'{"inputs":[%s]}'), (payloads.OpenAiEmbeddings, b'{"input":[%s]}'), (payloads.KServeInfer, b'{"inputs":[%s]}'),
    (payloads.KServeInfer, b'{"inputs":[{"name":"a","datatype":"BYTES","shape":[1]}],"outputs":[%s]}'),
    (payloads.KServeInfer, b'{"inputs":[{"name":"a","datatype":"BYTES","shape":[%s]}]}'),
])  # fmt: skip
def test_of_many_wrong_items_the_first_ends_the_check(payload: type[payloads.Payload], body: bytes) -> None:
    """An error for each item of one body took gigabytes, and no other request was answered."""
    with pytest.raises(ValidationError) as caught:
        payload.model_validate_json(body % b",".join([b"0.5"] * 1000))
    assert caught.value.error_count() <= 3, "one for each kind of value that the field may have"


def test_a_lone_surrogate_in_python_s_own_json_is_refused(server: InProcess) -> None:
    body = json.dumps({"inputs": "a \ud83d b"}).encode()
    assert server.post("/embed", body, Authorization="Bearer a key").status_code == 400


def infer(shape: str, more: str = "") -> bytes:
    return b'{"inputs":[{"name":"text","datatype":"BYTES","shape":%s,"data":["a"]}]%s}' % (shape.encode(), more.encode())


@pytest.mark.parametrize(("body", "headers", "status", "words"), [
    (infer("[1]"), {"Inference-Header-Content-Length": "9" * 5000}, 400, "Inference-Header-Content-Length"),
    (infer("[-1,-1]"), {}, 400, "inputs[0].shape"),
    (infer(f"[{'9' * 4000},{'9' * 4000}]"), {}, 400, "inputs[0].shape"),
    (infer(f"[{'1,' * 20_000}1]"), {}, 400, "inputs[0].shape"),
    (infer("[NaN]"), {}, 422, "shape"),
    (infer("[1]", ',"parameters":{"a":NaN}'), {}, 200, ""),
    (infer("[1]", f',"id":{"[" * 150}{"]" * 150}'), {}, 422, "id"),
    (infer("[1]", ',"id":"\u202e\U0001f600\\u0000"'), {}, 200, "\U0001f600"),
    (infer("[1]"), {"Content-Encoding": "gzip"}, 415, "Content-Encoding"),
    (infer("[1]"), {"Host": "["}, 200, ""),
    (infer("[1]", ',"id":7'), {"Host": "["}, 422, "id"),
    (infer("[1]", ',"id":7'), {"Host": "h/v1/embeddings?"}, 422, "id"),
])  # fmt: skip
def test_what_an_attacker_may_send_is_answered(
    server: InProcess, body: bytes, headers: dict[str, str], status: int, words: str, caplog: Any
) -> None:
    answer = server.post("/v2/models/tiny/infer", body, Authorization="Bearer a key", **headers)
    assert answer.status_code == status and words in answer.text and len(answer.text) < 2000, answer.text[:2000]
    assert status == 200 or isinstance(answer.json()["error"], str), "the shape of the API that was called"
    assert "failed" not in caplog.text


def test_of_keys_that_come_twice_the_last_counts(server: InProcess) -> None:
    answers = [server.post("/embed", body, Authorization="Bearer a key").json() for body in (b'{"inputs":"a","inputs":"b"}', b'{"inputs":"b"}')]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "tiny%00", "%ff", "\u212a"])
def test_a_model_s_name_is_no_path(server: InProcess, name: str) -> None:
    answer = server.get(f"/models/{name}/info", Authorization="Bearer a key")
    assert answer.status_code == 404 and "passwd" not in answer.text


def test_the_key_is_wanted_but_for_health_and_metrics(server: InProcess) -> None:
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "a key"}):
        answer = server.post("/v1/embeddings", {"input": "a"}, **headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/info").status_code == 401
    assert server.get("/health").status_code == server.get("/metrics").status_code == server.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("key", ["a key\n", " schlüssel ", "\u9375"])
def test_a_key_may_end_in_a_line_break_and_have_any_letters(artefact: Artefact, key: str) -> None:
    server = InProcess({"tiny": artefact()}, api_key=key)

    async def go(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/info", headers={b"Authorization": b"Bearer " + key.strip().encode()})

    assert server.run(go).status_code == 200
    assert server.get("/info", Authorization="Bearer other").status_code == 401
    server.close()


@pytest.mark.parametrize(("method", "path", "status"), [
    ("OPTIONS", "/embed", 405), ("TRACE", "/v1/embeddings", 405), ("PROPFIND", "/info", 405), ("BREW", "/nowhere", 404),
])  # fmt: skip
def test_any_method_gets_an_answer_in_the_shape_of_the_api_and_counts(embedder: InProcess, method: str, path: str, status: int) -> None:
    def counted() -> float:
        labels = {"route": "other", "status": str(status)}
        return float(embedder.state.metrics.registry.get_sample_value("bertopt_requests_total", labels) or 0)

    async def go(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path, headers={b"X-Request-Id": b"\xff"})

    before, answer = counted(), embedder.run(go)
    assert answer.status_code == status and answer.json()["error"] and counted() == before + 1
    assert answer.headers["x-request-id"].isascii()


def test_a_server_that_ends_is_not_ready_and_keeps_no_connection(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()})
    server.state.drain()
    for path in ("/health", "/v2/health/ready", "/v2/models/tiny/ready"):
        assert server.get(path).status_code == 503, "clients and probes read the status"
    assert server.get("/v2/health/live").status_code == 200
    answer = server.post("/embed", {"inputs": "a"})
    assert answer.status_code == 200 and answer.headers["connection"] == "close", "what is accepted is answered"
    server.close()


class Slow(Session):
    """A session that takes `seconds` for a batch."""

    def __init__(self, inner: Session, seconds: float) -> None:
        self.inner, self.seconds, self.texts = inner, seconds, 0

    def load(self, inputs: Any) -> None:
        self.texts += len(inputs["input_ids"])
        self.inner.load(inputs)

    def step(self) -> None:
        import time

        time.sleep(self.seconds)
        self.inner.step()

    def fetch(self) -> dict[str, np.ndarray]:
        return self.inner.fetch()


def test_more_requests_at_once_than_may_be_are_refused_before_they_are_read(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()}, concurrent_requests=2)
    batcher = server.state.models["tiny"].batcher
    batcher.session = Slow(batcher.session, 0.2)
    answers = server.together([("/embed", {"inputs": "a cat"})] * 2 + [("/embed", {"no": "inputs"}), ("/v1/embeddings", {"input": "a"})])
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(answer.headers["retry-after"] == "1" and "2 requests are at work" in answer.text for answer in refused)
    assert 'bertopt_refused_requests_total{model="tiny",reason="concurrent_requests"} 2.0' in server.get("/metrics").text
    assert server.post("/embed", {"inputs": "a cat"}).status_code == 200, "none is counted that was answered"
    assert server.get("/info").json()["max_concurrent_requests"] == 2
    server.close()


@pytest.mark.parametrize(("cache", "tokenised"), [(0, False), (1 << 20, True)])
def test_a_full_queue_refuses_before_it_tokenises_unless_the_cache_may_know_the_texts(
    artefact: Artefact, monkeypatch: pytest.MonkeyPatch, cache: int, tokenised: bool
) -> None:
    server = InProcess({"tiny": artefact()}, queue_tokens=100, cache_bytes=cache)
    model = server.state.models["tiny"]
    assert server.post("/embed", {"inputs": "a cat"}).status_code == 200
    flat, called = model.predictor.tokenizer.flat, []
    monkeypatch.setattr(model.predictor.tokenizer, "flat", lambda *given: called.append(given) or flat(*given))
    monkeypatch.setattr(model.batcher, "_tokens", 100)
    answer = server.post("/embed", {"inputs": ["a dog"] * 8})
    assert (answer.status_code, bool(called)) == (429, tokenised) and "retry-after" in answer.headers
    # Known answers need no queue.
    assert server.post("/embed", {"inputs": "a cat"}).status_code == (200 if cache else 429)
    monkeypatch.setattr(model.batcher, "_tokens", 0)
    assert server.post("/embed", {"inputs": ["a dog"] * 8}).status_code == 200
    server.close()


def test_a_request_that_takes_too_long_gets_504_and_its_work_is_dropped(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()}, timeout_s=0.3)
    batcher = server.state.models["tiny"].batcher
    batcher.session = slow = Slow(batcher.session, 1.5)

    async def go(client: httpx.AsyncClient) -> list[httpx.Response]:
        first = asyncio.create_task(client.post("/embed", json={"inputs": "a cat"}))
        while not slow.texts:
            await asyncio.sleep(0.01)
        return [*await asyncio.gather(*(client.post("/embed", json={"inputs": "a dog"}) for _ in range(3))), await first]

    answers = server.run(go)
    assert [answer.status_code for answer in answers] == [504] * 4
    assert "the work was dropped" in answers[0].json()["error"]
    server.close()
    assert slow.texts == 1, "what had not begun was not run"


@pytest.mark.parametrize("path", ["/embed", "/tokenize"])
def test_a_request_whose_tokenizer_takes_too_long_gets_504(artefact: Artefact, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    server = InProcess({"tiny": artefact()}, timeout_s=0.2)
    model, end = server.state.models["tiny"], threading.Event()
    ended: list[bool] = []
    monkeypatch.setattr("bertopt.serve.model.check", lambda *_: ended.append(end.wait(30)))

    async def go(client: httpx.AsyncClient) -> httpx.Response:
        try:
            answer = await client.post(path, json={"inputs": "cat " * 5000})
            assert not ended, "answered while the tokenizer was at work"
            return answer
        finally:
            end.set()

    answer = server.run(go)
    assert answer.status_code == 504 and "not answered within 0.2 s" in answer.text
    assert server.state.running == 0 and model.batcher._tokens == 0
    assert server.post(path, {"inputs": "a cat"}).status_code == 200
    server.close()


def test_very_long_texts_are_tokenised_one_after_another(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes hundreds of megabytes: a few at once were more than a container has."""
    server = InProcess({"tiny": artefact()})
    both, together, patience_s = threading.Barrier(2), list[bool](), [30.0]

    def met(*_: Any) -> None:
        try:
            both.wait(patience_s[0])
        except threading.BrokenBarrierError:
            both.reset()
        else:
            together.append(True)

    monkeypatch.setattr("bertopt.serve.model.check", met)
    body = {"inputs": "cat " * 5000}
    assert [answer.status_code for answer in server.together([("/embed", body)] * 2)] == [200, 200] and together, "long ones are together"
    together.clear()
    patience_s[0] = 0.2
    monkeypatch.setattr("bertopt.serve.model.LONG_CHARACTERS", 10_000)
    assert [answer.status_code for answer in server.together([("/embed", body)] * 3)] == [200] * 3 and not together
    server.close()


def test_the_tokens_of_a_request_to_tokenize_are_bounded(artefact: Artefact) -> None:
    """Each is 60 bytes of the answer, and more while it is made: 4 MB of text were 130 MB of answer and gigabytes of memory."""
    server = InProcess({"tiny": artefact()}, queue_tokens=100)
    assert server.post("/tokenize", {"inputs": "cat " * 98}).status_code == 200
    answer = server.post("/tokenize", {"inputs": ["cat " * 48, "cat " * 49]})
    assert answer.status_code == 422 and "inputs: the texts have 101 tokens; expected at most 100" in answer.json()["error"]
    server.close()


def test_the_queue_of_a_model_with_large_outputs_a_token_is_shorter(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill-mask gives a number for each token and each word that it knows: 32 GB for a queue of the default length."""
    directory = artefact("fill-mask")
    words = bertopt.load(directory).spec.vocabulary
    monkeypatch.setattr("bertopt.serve.model.OUTPUT_BYTES", 4 * words * 80)
    server = InProcess({"m": directory})
    assert server.state.models["m"].batcher.queue_tokens == 80
    assert server.post("/predict", {"inputs": [["the [MASK]"]] * 10}).status_code == 200
    answer = server.post("/predict", {"inputs": [["the [MASK]"]] * 30})
    assert answer.status_code == 422 and "the queue holds 80" in answer.json()["error"]
    server.close()
    monkeypatch.setattr("bertopt.serve.model.OUTPUT_BYTES", 1)
    server = InProcess({"m": directory})
    longest = server.state.models["m"].predictor.tokenizer.limit
    assert server.post("/predict", {"inputs": [["the [MASK] " * longest]]}).status_code == 200, "one text is always taken"
    server.close()


def test_empty_texts_do_not_spoil_the_estimate_of_others(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()})
    for _ in range(3):
        assert server.post("/embed", {"inputs": [""] * 1000}).status_code == 200
    assert server.state.models["tiny"]._tokens_a_character < 1
    server.close()


SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": "/embed", "raw_path": b"/embed", "headers": [], "query_string": b"", "http_version": "1.1",
    "scheme": "http", "server": ("server", 80), "client": ("me", 1), "root_path": "",
}  # fmt: skip
WHOLE = {"type": "http.request", "body": b'{"inputs": "a cat"}', "more_body": False}


def test_a_client_that_goes_is_dropped(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()})
    batcher = server.state.models["tiny"].batcher
    batcher.session = Slow(batcher.session, 0.3)

    async def go() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        parts = [WHOLE, {"type": "http.disconnect"}]

        async def receive() -> dict[str, Any]:
            return parts.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=server.app), base_url="http://server") as client:
            first = asyncio.create_task(client.post("/embed", json={"inputs": "the model is busy"}))
            await asyncio.sleep(0.1)
            await server.app(SCOPE.copy(), receive, send)
            await first
        return sent

    sent = asyncio.run(go())
    assert sent[0]["status"] == 499
    assert server.state.metrics.registry.get_sample_value("bertopt_dropped_requests_total", {"model": "tiny", "reason": "disconnected"}) == 1
    server.close()


@pytest.mark.parametrize("whole", [True, False])
def test_a_request_that_the_end_of_the_server_cuts_off_gets_503_and_counts(artefact: Artefact, whole: bool) -> None:
    """It got uvicorn's 500, a stack in the log, and no line in the access log."""
    server = InProcess({"tiny": artefact()})
    sent: list[dict[str, Any]] = []

    async def go() -> None:
        parts = [WHOLE] if whole else [{**WHOLE, "more_body": True}]
        waits = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not parts:
                waits.set()
                await asyncio.sleep(60)
            return parts.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        batcher = server.state.models["tiny"].batcher
        batcher.session = Slow(batcher.session, 0.3)
        task = asyncio.create_task(server.app(SCOPE.copy(), receive, send))
        await waits.wait()
        server.state.drain()
        task.cancel()
        await task

    asyncio.run(go())
    assert sent[0]["status"] == 503 and (b"connection", b"close") in sent[0]["headers"]
    assert "send the request again" in json.loads(sent[1]["body"])["error"]
    assert server.state.metrics.registry.get_sample_value("bertopt_requests_total", {"route": "/embed", "status": "503"}) == 1
    assert server.state.running == 0
    server.close()


def test_a_bug_is_500_with_the_request_s_id_and_no_stack(artefact: Artefact, caplog: Any) -> None:
    server = InProcess({"tiny": artefact()})
    server.state.models["tiny"].vectors = lambda outputs: 1 / 0
    with caplog.at_level(logging.ERROR, "bertopt.serve"):
        answer = server.post("/embed", {"inputs": "a"}, **{"X-Request-Id": "mine-7"})
    assert answer.status_code == 500 and "mine-7" in answer.json()["error"] and "ZeroDivision" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    server.close()


def test_the_access_log_is_one_json_object_a_request(
    artefact: Artefact, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, records = InProcess({"tiny": artefact()}), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("bertopt.access"), "handlers", [handler])
    caplog.set_level(logging.INFO, "bertopt.access")
    server.post("/embed", {"inputs": ["a", "the cat"]}, **{"X-Request-Id": "r1"})
    (line,) = [json.loads(record.getMessage()) for record in records]
    assert line["request_id"] == "r1" and line["status"] == 200 and line["texts"] == 2 and line["tokens"] == 7 and line["ms"] > 0
    server.close()


def test_answers_come_from_the_cache_where_tokens_are_the_same(artefact: Artefact) -> None:
    server = InProcess({"tiny": artefact()}, cache_bytes=1 << 20)
    first = server.post("/embed", {"inputs": ["a cat", "a dog"]}).json()
    assert server.post("/embed", {"inputs": ["A  cat", "the film", "a dog"]}).json()[::2] == first
    value = server.state.metrics.registry.get_sample_value
    assert value("bertopt_cache_hits_total", {"model": "tiny"}) == 2
    assert value("bertopt_cache_misses_total", {"model": "tiny"}) == 3
    assert 0 < value("bertopt_cache_bytes", {"model": "tiny"}) <= 1 << 20
    server.close()


def test_outputs_that_are_not_finite_are_an_error_and_no_null(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not kept in the cache either: what one batch spoilt, as a GPU may, was the answer from then on."""
    server = InProcess({"tiny": artefact()}, cache_bytes=1 << 20)
    model = server.state.models["tiny"]
    run = model._queued

    async def spoilt(*arguments: Any) -> Any:
        return [{name: np.full_like(array, np.nan) for name, array in outputs.items()} for outputs in await run(*arguments)]

    monkeypatch.setattr(model, "_queued", spoilt)
    for path, body in (("/embed", {"inputs": "a"}), ("/v1/embeddings", {"input": "a"})):
        answer = server.post(path, body)
        assert answer.status_code == 500 and "its log says why" in answer.text and "[null" not in answer.text
    monkeypatch.undo()
    assert server.post("/embed", {"inputs": "a"}).status_code == 200
    server.close()
