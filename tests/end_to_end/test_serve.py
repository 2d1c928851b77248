"""`bertopt serve` as a process, with the client libraries that people use."""

from __future__ import annotations

import contextlib
import json
import os
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
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Served:
    """A process that serves `models`, ready when this is."""

    def __init__(self, *models: str, options: tuple[str, ...] = ()) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "bertopt", "serve", *models, "--port", str(self.port), *options]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        )
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()
        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.log)
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()


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


def expected(directories: dict[str, Path], texts: list[str]) -> np.ndarray:
    predict = bertopt.load(directories["embeddings"])
    return np.concatenate([predict([text]) for text in texts])


def test_the_openai_client(embeddings: Served, directories: dict[str, Path]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{embeddings.url}/v1", api_key="none")
    texts = ["a cat sat", "the dog ran very fast"]
    answer = client.embeddings.create(model="embeddings", input=texts)
    assert np.abs(np.array([row.embedding for row in answer.data]) - expected(directories, texts)).max() < 1e-6
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
        client.embeddings.create(model="embeddings", input="a", dimensions=3)


def test_hugging_face_s_client(embeddings: Served, directories: dict[str, Path]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=embeddings.url)
    got = client.feature_extraction("a cat sat")
    assert np.abs(np.asarray(got).ravel() - expected(directories, ["a cat sat"])[0]).max() < 1e-6
    served = Served(str(directories["sentiment"]))
    try:
        rows = hub.InferenceClient(model=served.url).text_classification("a very good film")
        best = bertopt.load(directories["sentiment"])(["a very good film"])[0]
        assert rows[0].label == best["label"] and abs(rows[0].score - best["score"]) < 1e-6
    finally:
        served.end()


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


def refused(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "bertopt", "serve", *arguments, "--port", str(free_port())], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stderr


def test_what_cannot_be_served_is_refused_at_once(directories: dict[str, Path], tmp_path: Path) -> None:
    damaged = shutil.copytree(directories["embeddings"], tmp_path / "damaged")
    (damaged / "config.json").write_text("{}")
    code, said = refused(str(damaged))
    assert code == 6 and "'config.json'" in said
    code, said = refused(str(tmp_path / "nothing"))
    assert code == 2 and "has no manifest.json" in said
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
    done = CliRunner().invoke(app, ["serve", str(elsewhere)])
    assert done.exit_code == 4 and "this CPU has none of" in done.stderr


def test_a_port_that_is_taken_is_said(embeddings: Served, directories: dict[str, Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bertopt", "serve", str(directories["embeddings"]), "--port", str(embeddings.port), "--no-warm-up"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2 and "choose a free port" in done.stderr


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
    with pytest.raises(Unsupported, match="does not answer"):
        verify_url(directories["embeddings"], f"http://127.0.0.1:{free_port()}")
