"""`bertopt serve` as a process, with the client libraries that people use."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import bertopt
from tests.support.artefacts import write_artefact
from tests.support.serving import ROOT, Served, free_port
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def directories(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    return {
        "embeddings": write_artefact(tiny(task="feature-extraction", pooling="mean"), folder / "embeddings"),
        "sentiment": write_artefact(tiny(), folder / "sentiment"),
    }


@pytest.fixture(scope="module")
def embeddings(directories: dict[str, Path]) -> Iterator[Served]:
    served = Served(str(directories["embeddings"]))
    yield served
    served.end()


def test_connections_near_the_limit_of_open_files_are_told(directories: dict[str, Path]) -> None:
    """uvloop closes those beyond it without a word."""
    served = Served(f"m={directories['embeddings']}")
    files = len(list(Path(f"/proc/{served.process.pid}/fd").iterdir()))
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (files + 40, files + 40))
    with contextlib.ExitStack() as clients:
        for _ in range(39):
            clients.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        end = time.monotonic() + 30
        while not any("connections are open" in line for line in served.log) and time.monotonic() < end:
            time.sleep(0.1)
    served.end()
    assert any(f"and {files + 40} files may be: more are closed unanswered; raise ulimit -n" in line for line in served.log)


def expected(directories: dict[str, Path], texts: list[str]) -> np.ndarray:
    predict = bertopt.load(directories["embeddings"])
    return np.concatenate([predict([text]) for text in texts])


def test_sigterm_under_load_loses_no_accepted_request(directories: dict[str, Path]) -> None:
    served = Served(f"m={directories['embeddings']}", options=("--drain", "0.3"))
    right = expected(directories, ["a cat sat on the mat"])[0]
    answers: list[Any] = []
    ending = threading.Event()

    def client() -> None:
        with httpx.Client(timeout=30) as http:
            while True:
                try:
                    answer = http.post(f"{served.url}/embed", json={"inputs": "a cat sat on the mat"})
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                    # Never accepted: the port is closed, or an idle connection was as this request was sent.
                    assert ending.is_set(), error
                    return
                answers.append(answer)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(answers) < 50:
        time.sleep(0.01)
    ending.set()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=60) == 0
    for thread in threads:
        thread.join(30)
    assert {answer.status_code for answer in answers} == {200}
    assert all(np.allclose(answer.json()[0], right, atol=1e-6) for answer in answers)
    assert not any("Traceback" in line for line in served.log)


def test_a_request_on_an_open_connection_is_answered_while_the_server_ends(directories: dict[str, Path]) -> None:
    served = Served(f"m={directories['embeddings']}")
    connections = [httpx.Client(timeout=30) for _ in range(8)]
    for connection in connections:
        assert connection.get(f"{served.url}/health").status_code == 200
    served.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
        while True:
            socket.create_connection(("127.0.0.1", served.port), 5).close()
            time.sleep(0.002)
    for connection in connections:
        answer = connection.post(f"{served.url}/embed", json={"inputs": "a cat"})
        assert answer.status_code == 200 and answer.headers["connection"] == "close"
    assert served.process.wait(timeout=60) == 0


def test_a_second_signal_ends_at_once_and_not_with_exit_code_0(directories: dict[str, Path]) -> None:
    served = Served(f"m={directories['embeddings']}", "--drain", "60")
    served.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{served.url}/v2/health/ready").status_code == 200:
        time.sleep(0.01)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_log_names_the_address_to_call(directories: dict[str, Path], host: str) -> None:
    if host == "::1":
        try:
            with socket.socket(socket.AF_INET6) as one:
                one.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    command = [sys.executable, "-m", "bertopt", "serve", f"m={directories['embeddings']}", "--host", host, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "listening on " in line)
        url = said.partition("listening on ")[2].partition(";")[0]
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def refused(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "bertopt", "serve", *arguments, "--port", "0"], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_what_cannot_be_served_is_refused_at_once(directories: dict[str, Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(directories["embeddings"], tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    code, said = refused(str(damaged))
    assert code == 6 and "'config.json'" in said
    code, said = refused(str(tmp_path / "nothing"))
    assert code == 2 and "there is no" in said and "give the directory of a stage or artefact" in said
    code, said = refused(str(directories["embeddings"]), "--request-texts", "0")
    assert code == 2 and "request_texts must be more than 0" in said


def test_an_artefact_for_other_instructions_is_refused(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from bertopt import stages
    from bertopt.cli import app
    from bertopt.system import environment

    elsewhere = shutil.copytree(directories["embeddings"], tmp_path / "elsewhere")
    fields = json.loads((elsewhere / stages.MANIFEST).read_text())
    (elsewhere / stages.MANIFEST).unlink()
    kept = {name: fields[name] for name in ("device", "form", "precision", "spec", "path", "environment")}
    kept["precision"], kept["environment"]["isa"] = "int8", ["avx512_vnni"]
    stages.write_manifest(elsewhere, kept)
    monkeypatch.setattr(environment, "isa", lambda cpuinfo=None: ["avx2"])
    monkeypatch.setattr("bertopt.serve.server._log_to_stderr", lambda level: None)  # loggers outlive the test
    done = CliRunner().invoke(app, ["serve", str(elsewhere)])
    assert done.exit_code == 4 and "this CPU has none of" in done.stderr


def test_an_artefact_that_answers_otherwise_than_when_it_was_exported_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    from bertopt import stages
    from bertopt.errors import WrongAnswer
    from bertopt.runtime import replay
    from bertopt.serve.app import create
    from bertopt.serve.settings import Settings

    changed = shutil.copytree(directories["embeddings"], tmp_path / "changed")
    fields = json.loads((changed / stages.MANIFEST).read_text())
    recorded = replay.answers(bertopt.load(changed))

    def record(answers: Any) -> None:
        (changed / stages.MANIFEST).unlink()
        kept = {name: fields[name] for name in ("device", "form", "precision", "spec", "path", "environment")}
        stages.write_manifest(changed, {**kept, "answers": answers})

    record(recorded)
    create({"m": changed}, Settings(warm_up=False)).state.bertopt.models["m"].close()
    recorded[3][0][2] += 1.0
    record(recorded)
    with pytest.raises(WrongAnswer, match="text 3"):
        create({"m": changed}, Settings(warm_up=False))


def test_a_port_that_is_taken_is_said(embeddings: Served, directories: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bertopt", "serve", str(directories["embeddings"]), "--port", str(embeddings.port), "--no-warm-up"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and "choose a free port" in done.stderr
    assert "uvicorn" not in done.stderr, "the fault is named once"


def test_a_second_signal_leaves_no_traceback() -> None:
    from bertopt.serve.server import _worth_saying

    def record(text: str) -> logging.LogRecord:
        return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, text, None, None)

    assert not _worth_saying(record("Traceback (most recent call last):\n  …\nasyncio.exceptions.CancelledError\n"))
    assert _worth_saying(record("Traceback (most recent call last):\n  …\nValueError: no\n"))


def test_verify_holds_a_running_server_to_the_artefact(
    embeddings: Served, directories: dict[str, Path], tiny: Tiny, tmp_path: Path
) -> None:
    from bertopt.commands.verify_url import verify_url
    from bertopt.errors import Unsupported, UsageError

    same = verify_url(directories["embeddings"], embeddings.url)
    assert same.exit_code == 0 and same.max_abs < 1e-5 and same.p95_ms > 0, same
    slow = verify_url(directories["embeddings"], embeddings.url, latency_ms=1e-6)
    assert slow.exit_code == 3 and "p95" in slow.reason
    other = write_artefact(tiny(task="feature-extraction", pooling="mean", seed=1), tmp_path / "other")
    wrong = verify_url(other, embeddings.url)
    assert wrong.exit_code == 3 and "max_abs" in wrong.reason
    with pytest.raises(UsageError, match="answered 424"):
        verify_url(directories["sentiment"], embeddings.url)
    with pytest.raises(Unsupported, match=r"does not answer \(Connection refused\); is the server ready"):
        verify_url(directories["embeddings"], f"http://127.0.0.1:{free_port()}")
