"""`verify --url` against servers that answer single texts rightly and lists or pairs wrongly, and against right ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http import HTTPStatus
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
from tests.support.proteins import write_protein
from tests.support.tiny_models import Tiny, without_normalize, write_tiny

Answer = Callable[[str, list[Any]], Any]


def served(answer: Answer) -> AbstractContextManager[str]:
    """Serve `answer(path, inputs)`, at all routes but `/rerank`."""

    def of_inputs(path: str, body: dict[str, Any]) -> Any:
        given = body.get("inputs", body.get("input"))
        return None if path == "/rerank" else answer(path, given if isinstance(given, list) else [given])

    return served_bodies(of_inputs)


@contextmanager
def served_bodies(answer: Callable[[str, dict[str, Any]], Any]) -> Iterator[str]:
    """Serve `answer(path, body)` as JSON, or a status; None is answered by 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = json.dumps(found).encode()
            self.send_response(404 if found is None else found if isinstance(found, HTTPStatus) else 200)
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


@pytest.fixture(scope="module")
def re_ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose scores are near 0 for most pairs, as for passages that do not match."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("re-ranker")
    source = write_tiny(folder / "model", extra={"num_labels": 1})
    state = load_file(source / "model.safetensors")
    state["classifier.weight"] *= 2
    state["classifier.bias"] -= 11
    save_file(state, source / "model.safetensors", {"format": "pt"})
    return write_artefact(source, folder / "artifact", "native")


def test_a_re_ranker_is_held_to_how_its_logits_vary(re_ranker: Path) -> None:
    """Scores of passages that do not match are near 0, whatever becomes of the second text."""
    predictor = bertopt.load(re_ranker)

    def answer(words: int | None) -> Answer:
        def scored(path: str, inputs: list[Any]) -> Any:
            texts = [one[0] if len(one) == 1 else (one[0], " ".join(one[1].split()[:words])) for one in inputs]
            rows = task_outputs.label_scores(predictor.spec, np.concatenate([predictor.logits([text]) for text in texts]))
            return [[{"label": predictor.spec.labels[0], "score": float(row[0])}] for row in rows]

        return scored

    with served(answer(None)) as url:
        assert verify_url(re_ranker, url).exit_code == 0
    with served(answer(8)) as url:
        assert "worst_text" in verify_url(re_ranker, url).reason


@pytest.mark.parametrize("spoilt", ["nothing", "passages", "lists", "one missing"])
def test_a_re_ranker_is_asked_at_rerank_where_there_is_one(re_ranker: Path, tmp_path: Path, spoilt: str) -> None:
    predictor = bertopt.load(re_ranker)
    sizes: list[int] = []

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path != "/rerank":
            return None
        assert body["raw_scores"] is True and body["truncate"] is True
        texts = [" ".join(text.split()[:8]) if spoilt == "passages" else text for text in body["texts"]]
        sizes.append(len(texts))
        logits = [float(predictor.logits([(body["query"], text)])[0, 0]) for text in texts]
        best = sorted(range(len(texts)), key=lambda i: -logits[i])
        rows = [{"index": n if spoilt == "lists" else i, "score": logits[i]} for n, i in enumerate(best)]
        return rows[1:] if spoilt == "one missing" else rows

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "a cat {i % 2}", "text_pair": "the dog sat {i}"}}\n' for i in range(6)))
    with served_bodies(answer) as url:
        if spoilt == "one missing":
            with pytest.raises(UsageError, match="/rerank does not answer as text-embeddings-inference does"):
                verify_url(re_ranker, url)
            return
        found = verify_url(re_ranker, url)
        assert max(sizes) > 20 and found.exit_code == (0 if spoilt == "nothing" else 3)
        assert spoilt == "nothing" or "worst_text" in found.reason
        assert spoilt == "passages" or verify_url(re_ranker, url, texts).exit_code == found.exit_code
        texts.write_text('{"text": "a cat"}\n')
        with pytest.raises(UsageError, match="has no /predict; it has /rerank, which answers pairs alone: give --texts a file of pairs"):
            verify_url(re_ranker, url, texts)


def test_a_server_that_gives_the_best_label_alone_is_told_how_to_give_all(classifier: Path) -> None:
    whole = scores(classifier)
    for best in (lambda row: row[:1], lambda row: row[0]):
        with served(lambda path, inputs, best=best: [best(row) for row in whole(path, inputs)]) as url, pytest.raises(UsageError, match=r"1 of 3 labels \(bad\); .* top_k=None"):
            verify_url(classifier, url)


@pytest.mark.parametrize("answer", [{}, [], {"label": "good"}, [["good"]], 3, [[{"label": "good"}]]])
def test_an_answer_of_another_shape_is_named(classifier: Path, embedder: Path, answer: Any) -> None:
    for artefact, path in ((classifier, "/predict"), (embedder, "/embed")):
        with served(lambda path, inputs: answer) as url, pytest.raises(UsageError, match=f"{path} does not answer as text-embeddings-inference does"):
            verify_url(artefact, url)


@pytest.mark.parametrize("route", ["/embed", "/v1/embeddings"])
@pytest.mark.parametrize("normalises", [True, False])
def test_a_server_normalises_where_the_model_does(tiny: Tiny, tmp_path: Path, normalises: bool, route: str) -> None:
    """text-embeddings-inference normalises unless `normalize` is false, and at OpenAI's route always."""
    source = tiny("bert", "feature-extraction", "mean")
    artefact = write_artefact(source if normalises else without_normalize(source, tmp_path / "source"), tmp_path / "artifact")
    predictor = bertopt.load(artefact)

    def answer(obeys: bool) -> Callable[[str, dict[str, Any]], Any]:
        def vectors(path: str, body: dict[str, Any]) -> Any:
            if path != route:
                return None
            given = body.get("inputs", body.get("input"))
            rows = np.concatenate([predictor.logits([text]) for text in ([given] if isinstance(given, str) else given)])
            if body.get("normalize", True) or not obeys:
                rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            return rows.tolist() if route == "/embed" else {"data": [{"index": i, "embedding": row} for i, row in enumerate(rows.tolist())]}

        return vectors

    with served_bodies(answer(True)) as url:
        assert verify_url(artefact, url).exit_code == 0
    with served_bodies(answer(False)) as url:
        assert verify_url(artefact, url).exit_code == (0 if normalises or route == "/v1/embeddings" else 3)


def test_a_server_that_takes_no_lists_is_told_from_one_that_answers_nothing(classifier: Path) -> None:
    alone = scores(classifier)
    with served(lambda path, inputs: alone(path, inputs) if len(inputs) == 1 else None) as url, pytest.raises(UsageError, match="single texts were answered, but not 32 in one request"):
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


def test_a_server_that_wants_a_key_says_how_to_give_one(embedder: Path) -> None:
    with served_bodies(lambda path, body: HTTPStatus.UNAUTHORIZED) as url, pytest.raises(UsageError, match=r"answered 401: 401; give the server's key with --api-key"):
        verify_url(embedder, url)


def test_sparse_embeddings_are_compared_whole(tiny: Tiny, tmp_path: Path) -> None:
    artefact = write_artefact(tiny("bert", "feature-extraction", "splade"), tmp_path / "artifact")
    predictor = bertopt.load(artefact)

    def answering(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Answer:
        def answer(path: str, inputs: list[Any]) -> Any:
            if path != "/embed_sparse":
                return None
            rows = predictor(inputs)
            return [change([{"index": i, "value": v} for i, v in zip(row["indices"], row["values"], strict=True)]) for row in rows]

        return answer

    with served(answering(lambda row: row[::-1])) as url:
        assert verify_url(artefact, url).exit_code == 0
    with served(answering(lambda row: row[:-1])) as url:
        assert verify_url(artefact, url).exit_code == 3
    with served(answering(lambda row: [{**one, "index": one["index"] + 1000} for one in row])) as url, pytest.raises(UsageError, match="the artefact's vocabulary has 85"):
        verify_url(artefact, url)


def test_a_model_of_proteins_is_asked_for_proteins(tmp_path: Path) -> None:
    """It was asked for texts of unknown words, which are nearly alike to it."""
    artefact = write_artefact(write_protein(tmp_path / "checkpoint", "feature-extraction", "mean", extra={"max_position_embeddings": 130}), tmp_path / "artifact")
    predictor = bertopt.load(artefact)
    asked = list[str]()

    def answer(path: str, inputs: list[Any]) -> Any:
        asked.extend(inputs)
        return np.asarray(predictor(inputs)).tolist() if path == "/embed" else None

    with served(answer) as url:
        assert verify_url(artefact, url).exit_code == 0
    ids = np.concatenate([row.ids[1:-1] for row in predictor.tokenizer.encode(asked)])
    assert (ids == 3).mean() < 0.2, "few tokens are unknown"
