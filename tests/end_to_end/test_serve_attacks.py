"""`bertopt serve` and clients that mean no good, over real sockets. What it does not look at: many connections at once, TLS, and
what a proxy in front does."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.artefacts import write_artefact
from tests.support.serving import Served
from tests.support.tiny_models import Tiny

TIMEOUT_S = 1
BODY = json.dumps({"inputs": "a cat"}).encode()
HEAD = b"POST /embed HTTP/1.1\r\nHost: s\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LAST = HEAD + b"Connection: close\r\n"
CHUNKED = LAST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    artefact = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path_factory.mktemp("served") / "m")
    one = Served(str(artefact), options=("--timeout", str(TIMEOUT_S), "--request-mb", "1"))
    yield one
    assert one.end() == 0, "nothing that was sent keeps it from ending"
    assert not [line for line in one.log if "bertopt" in line and "Traceback" in line]


@pytest.fixture(autouse=True)
def goes_on(served: Served) -> Iterator[None]:
    yield
    assert httpx.post(f"{served.url}/embed", content=BODY, timeout=30).status_code == 200


def connected(served: Served) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", served.port), 30)
    one.settimeout(30)
    return one


def until_closed(one: socket.socket) -> bytes:
    """Return what comes until the server closes; raises TimeoutError where it does not."""
    got = b""
    try:
        while part := one.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("sent", [
    b"", b"POST /embed HT", HEAD + b"Content-Le",
], ids=["nothing", "half a line", "half a head"])  # fmt: skip
def test_a_client_that_does_not_finish_its_head_is_closed(served: Served, sent: bytes) -> None:
    with connected(served) as one:
        one.sendall(sent)
        assert not until_closed(one)


def test_a_second_head_that_does_not_end_is_closed(served: Served) -> None:
    with connected(served) as one:
        one.sendall(WHOLE)
        assert one.recv(1).startswith(b"H")
        time.sleep(0.5)
        one.sendall(b"GET /hea")
        assert until_closed(one).count(b"HTTP/1.1") == 0


def test_a_head_that_drips_is_closed(served: Served) -> None:
    with connected(served) as one, pytest.raises(ConnectionError):
        one.sendall(HEAD)
        for number in range(300):
            one.sendall(b"X-%d: y\r\n" % number)
            time.sleep(0.05)


def test_a_body_that_does_not_come_gets_408_and_the_connection_ends(served: Served) -> None:
    with connected(served) as one:
        one.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in until_closed(one).splitlines()[0]


def test_a_body_without_end_is_refused_and_the_connection_ends(served: Served) -> None:
    with connected(served) as one:
        one.sendall(CHUNKED)
        try:
            for _ in range(3000):
                one.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                time.sleep(0.01)
        except ConnectionError:
            return
    raise AssertionError("12 MB were taken where 1 MB may come")


def test_chunked_bodies_are_read(served: Served) -> None:
    with connected(served) as one:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
        one.sendall(CHUNKED + chunks + b"0\r\n\r\n")
        assert b" 200 " in until_closed(one).splitlines()[0]


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    bad = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with connected(served) as one:
        one.sendall(WHOLE + bad + WHOLE + bad.replace(HEAD, LAST))
        answer = until_closed(one)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"422", b"200", b"422"]


@pytest.mark.parametrize("sent", [
    b"GET /" + b"a" * 10**6 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: s\r\nX-A: " + b"a" * 10**6 + b"\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: s\r\nConnection: close\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    CHUNKED + b"fffffffffffffffffffffff\r\n",
    CHUNKED + b"-1\r\n",
], ids=["long target", "long header", "target no ASCII", "TLS", "negative", "huge length", "two lengths", "huge chunk", "negative chunk"])  # fmt: skip
def test_what_is_no_http_is_closed_without_500(served: Served, sent: bytes) -> None:
    with connected(served) as one:
        try:
            one.sendall(sent)
        except ConnectionError:
            return
        assert b" 500 " not in until_closed(one)


def test_trailers_are_no_headers(served: Served) -> None:
    with connected(served) as one:
        one.sendall(CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nContent-Encoding: gzip\r\n\r\n")
        assert b" 200 " in until_closed(one).splitlines()[0]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
OFFERS = {
    "Java's": HEAD + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "chunked": HEAD + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    "websocket": HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
}
NONE = b"GET /health HTTP/1.1\r\nHost: s\r\n" + UPGRADE + b"\r\n"


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_that_offers_another_protocol_is_answered_in_this_one(served: Served, offer: bytes, at_once: bool) -> None:
    """Java's client offers HTTP/2 with every first request. Its body was dropped, and what came late was taken for a request."""
    requests = offer + NONE + offer + WHOLE + WHOLE.replace(HEAD, LAST)
    with connected(served) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(requests), step := len(requests) if at_once else 7):
            one.sendall(requests[start : start + step])
            time.sleep(0.001)
        answer = until_closed(one)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 5
    assert len(set(re.findall(rb"\[\[[^\]]+\]\]", answer))) == 1


def test_the_body_of_an_offer_is_no_request(served: Served) -> None:
    inner = b"GET /metrics HTTP/1.1\r\nHost: s\r\n\r\n"
    with connected(served) as one:
        one.sendall(HEAD + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(inner))
        time.sleep(0.1)
        one.sendall(inner + WHOLE.replace(HEAD, LAST))
        answer = until_closed(one)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400", b"200"] and b"bertopt_" not in answer


def test_a_client_that_does_not_read_is_closed(served: Served) -> None:
    """It asks and asks, and takes nothing of the answers."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", served.port))
        one.settimeout(30)
        many = json.dumps({"inputs": ["a"] * 1000}).encode()
        one.sendall((HEAD + b"Content-Length: %d\r\n\r\n" % len(many) + many) * 40)  # 25 MB of answers
        with pytest.raises(ConnectionError):
            for _ in range(300):
                one.sendall(b"\r\n")
                time.sleep(0.1)
