"""`verify --url` against servers that answer single texts rightly and lists or pairs wrongly, and against right ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt.commands.verify_url import verify_url
from bertopt.errors import UsageError
from bertopt.runtime import task_outputs
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny, write_tiny

Answer = Callable[[str, list[Any]], Any]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """Serve `answer(path, inputs)` as JSON; None is answered by 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = body.get("inputs", body.get("input"))
            found = answer(self.path, given if isinstance(given, list) else [given])
            content = json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def classifier(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny("bert"), tmp_path_factory.mktemp("classifier") / "artifact")


@pytest.fixture(scope="module")
def embedder(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny("bert", "feature-extraction", "mean"), tmp_path_factory.mktemp("embedder") / "artifact")


def scores(directory: Path, spoil_list: bool = False, spoil_pairs: bool = False) -> Answer:
    predictor = bertopt.load(directory)

    def answer(path: str, inputs: list[Any]) -> Any:
        texts = [one[0] if len(one) == 1 or spoil_pairs else tuple(one) for one in inputs]
        rows = task_outputs.label_scores(predictor.spec, np.concatenate([predictor.logits([text]) for text in texts]))
        rows = rows[::-1] if spoil_list else rows
        return [[{"label": name, "score": float(value)} for name, value in zip(predictor.spec.labels, row, strict=True)] for row in rows]

    return answer


def test_a_classifier_is_asked_for_pairs_and_lists(classifier: Path, tmp_path: Path) -> None:
    with served(scores(classifier)) as url:
        assert verify_url(classifier, url).exit_code == 0
    with served(scores(classifier, spoil_list=True)) as url:
        assert "worst_text" in verify_url(classifier, url).reason
    with served(scores(classifier, spoil_pairs=True)) as url:
        assert "worst_text" in verify_url(classifier, url).reason
        texts = tmp_path / "texts.jsonl"
        texts.write_text('{"text": "a cat", "text_pair": "the dog sat"}\n{"text": "a dog", "text_pair": "on the mat"}\n')
        assert verify_url(classifier, url, texts).exit_code == 3


def test_a_re_ranker_is_held_to_how_its_logits_vary(tmp_path: Path) -> None:
    """Scores of passages that do not match are near 0, whatever becomes of the second text."""
    from safetensors.torch import load_file, save_file

    source = write_tiny(tmp_path / "model", extra={"num_labels": 1})
    state = load_file(source / "model.safetensors")
    state["classifier.weight"] *= 2
    state["classifier.bias"] -= 11
    save_file(state, source / "model.safetensors", {"format": "pt"})
    artefact = write_artefact(source, tmp_path / "artifact", "native")
    predictor = bertopt.load(artefact)

    def answer(words: int | None) -> Answer:
        def scored(path: str, inputs: list[Any]) -> Any:
            texts = [one[0] if len(one) == 1 else (one[0], " ".join(one[1].split()[:words])) for one in inputs]
            rows = task_outputs.label_scores(predictor.spec, np.concatenate([predictor.logits([text]) for text in texts]))
            return [[{"label": predictor.spec.labels[0], "score": float(row[0])}] for row in rows]

        return scored

    with served(answer(None)) as url:
        assert verify_url(artefact, url).exit_code == 0
    with served(answer(8)) as url:
        assert "worst_text" in verify_url(artefact, url).reason


def test_a_server_that_takes_no_lists_is_told_from_one_that_answers_nothing(classifier: Path) -> None:
    alone = scores(classifier)
    with served(lambda path, inputs: alone(path, inputs) if len(inputs) == 1 else None) as url, pytest.raises(UsageError, match="one by one were answered, 32 in one request were not"):
        verify_url(classifier, url)


@pytest.mark.parametrize("route", ["/embed", "/v1/embeddings"])
def test_embeddings_are_asked_for_lists_by_either_route(embedder: Path, route: str) -> None:
    predictor = bertopt.load(embedder)

    def answer(spoilt: bool) -> Answer:
        def vectors(path: str, inputs: list[Any]) -> Any:
            if path != route:
                return None
            rows = np.concatenate([predictor.logits([text]) for text in inputs]).tolist()
            if spoilt:
                rows.reverse()
            # The protocol gives an index to each, so that their order is open.
            return rows if route == "/embed" else {"data": [{"index": i, "embedding": row} for i, row in enumerate(rows)][::-1]}

        return vectors

    with served(answer(False)) as url:
        assert verify_url(embedder, url).exit_code == 0
    with served(answer(True)) as url:
        assert "worst_text" in verify_url(embedder, url).reason
