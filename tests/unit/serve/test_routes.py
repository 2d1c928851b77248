"""Routes in the shapes of text-embeddings-inference, OpenAI and KServe, with the answers of `bertopt.load`."""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from tests.support.artefacts import write_artefact, write_prompted_artefact
from tests.support.serving import InProcess
from tests.support.tiny_models import Tiny, without_normalize, write_tiny
from tests.unit.serve.conftest import Artefact

TEXTS = ["a cat sat on the mat", "the dog ran", "very good film !", "it was not good , it was bad"]


def offline(directory: Any, texts: list[Any]) -> np.ndarray:
    """Each text by itself."""
    predict = bertopt.load(directory)
    return np.concatenate([np.asarray(predict([text])) for text in texts])


def test_embed(embedder: InProcess, artefact: Artefact) -> None:
    expected = offline(artefact(), TEXTS)
    answer = embedder.post("/embed", {"inputs": TEXTS})
    assert answer.status_code == 200 and np.abs(np.array(answer.json()) - expected).max() < 1e-6
    (one,) = embedder.post("/embed", {"inputs": TEXTS[0]}).json()
    assert np.array_equal(np.array(one, np.float32), expected[0])
    assert embedder.post("/models/tiny/embed", {"inputs": TEXTS[0]}).json() == [one]
    assert embedder.post("/", {"inputs": TEXTS[0]}).json() == [one]


def test_prompts_are_put_before_texts_by_name(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_prompted_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "prompted", query="the cat: ", text="")
    plain, prompted = offline(directory, TEXTS), offline(directory, [f"the cat: {text}" for text in TEXTS])
    server = InProcess({"prompted": directory})
    try:
        for name, expected in (("query", prompted), ("text", plain), (None, plain)):
            got = np.array(server.post("/embed", {"inputs": TEXTS, "prompt_name": name}).json())
            assert np.abs(got - expected).max() < 1e-6
            inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
            cosines = server.post("/similarity", {"inputs": inputs, "parameters": {"prompt_name": name}}).json()
            unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
            assert np.abs(np.array(cosines) - unit[1:] @ unit[0]).max() < 1e-6
            rows = server.post("/v1/embeddings", {"input": TEXTS, "prompt_name": name}).json()["data"]
            assert np.abs(np.array([row["embedding"] for row in rows]) - expected).max() < 1e-6
            tensor = {"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}
            answer = server.post("/v2/models/prompted/infer", {"inputs": [tensor], "parameters": {"prompt_name": name}}).json()
            assert np.abs(np.array(answer["outputs"][0]["data"]).reshape(expected.shape) - expected).max() < 1e-6
        tokens = [server.post("/tokenize", {"inputs": text, **name}).json() for text, name in
                  ((TEXTS[0], {"prompt_name": "query"}), (f"the cat: {TEXTS[0]}", {}))]  # fmt: skip
        assert tokens[0] == tokens[1]
        for path, body in (
            ("/embed", {"inputs": "a", "prompt_name": "passage"}), ("/tokenize", {"inputs": "a", "prompt_name": "passage"}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a"]}, "parameters": {"prompt_name": "passage"}}),
        ):  # fmt: skip
            answer = server.post(path, body)
            assert answer.status_code == 422 and "its prompts are 'query', 'text'" in answer.json()["error"]
        refused = server.post("/v1/embeddings", {"input": "a", "prompt_name": "passage"})
        assert refused.status_code == 422 and refused.json()["error"]["param"] == "prompt_name"
        one = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
        for wrong, message in (("passage", "its prompts are 'query', 'text'"), (["query"], "expected a prompt's name; got ['query']")):
            refused = server.post("/v2/models/prompted/infer", {"inputs": [one], "parameters": {"prompt_name": wrong}})
            assert refused.status_code == 422 and message in refused.json()["error"]
        many = server.post("/embed", {"inputs": [""] * 5000, "prompt_name": "query"})
        assert many.status_code == 422 and "inputs: expected at most 1024 texts; got 5000" in many.json()["error"]
        assert server.get("/info").json()["bertopt"]["prompts"] == {"query": "the cat: ", "text": ""}
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_served_answers_are_those_of_the_predictor_whatever_they_were_batched_with(
    kind: str, artefact: Artefact, tiny: Tiny, tmp_path: Path
) -> None:
    directory = artefact(form="openvino")
    if kind == "packed":
        directory = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "packed", packed=True)
    texts = [" ".join(["cat", "dog", "sat"][: 1 + i % 3]) + " very" * (i % 20) for i in range(64)]
    expected = offline(directory, texts)
    server = InProcess({"tiny": directory})
    try:
        answers = server.together([("/embed", {"inputs": text}) for text in texts])
        got = np.array([answer.json()[0] for answer in answers], np.float32)
        assert np.abs(got - expected).max() < 1e-6
    finally:
        server.close()


@pytest.mark.skipif(
    not (importlib.util.find_spec("bertopt_native") and importlib.import_module("bertopt_native").supported()),
    reason="bertopt-native is not installed, or this CPU has no AVX2",
)
def test_with_scales_per_token_a_served_answer_is_the_predictors_to_the_bit(artefact: Artefact) -> None:
    directory = artefact(form="native")
    texts = [" ".join(["cat", "dog", "sat"][: 1 + i % 3]) + " very" * (i % 20) for i in range(64)]
    expected = offline(directory, texts)
    server = InProcess({"tiny": directory})
    try:
        answers = server.together([("/embed", {"inputs": text}) for text in texts])
        together = server.post("/embed", {"inputs": texts}).json()
        bits = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    finally:
        server.close()
    for got in ([answer.json()[0] for answer in answers], together, [row["embedding"] for row in bits]):
        assert np.array_equal(np.array(got, np.float32), expected)
    assert all(len(answer.content) < 13 * expected.shape[1] for answer in answers), "more digits than float32 has"


def test_a_text_is_never_cut_at_another_end_than_was_asked(tiny: Tiny, tmp_path: Path) -> None:
    source = shutil.copytree(tiny(task="feature-extraction", pooling="mean"), tmp_path / "left")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**config, "truncation_side": "left"}))
    server = InProcess({"left": write_artefact(source, tmp_path / "artefact", "eager")})
    try:
        text = "the dog " * 60 + "a very good film"
        left, right, either = (server.post("/embed", {"inputs": text, "truncation_direction": end}) for end in ("Left", "Right", None))
        assert left.json() == either.json() != server.post("/embed", {"inputs": "the dog " * 60}).json()
        assert right.status_code == 422 and "the artefact cuts at the left" in right.json()["error"]
    finally:
        server.close()


def test_similarity(embedder: InProcess, artefact: Artefact) -> None:
    vectors = offline(artefact(), TEXTS)
    answer = embedder.post("/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}}).json()
    assert np.abs(np.array(answer) - vectors[1:] @ vectors[0]).max() < 1e-5


def test_tokenize_says_where_tokens_are(embedder: InProcess) -> None:
    (tokens,) = embedder.post("/tokenize", {"inputs": "the Cat"}).json()
    assert [token["text"] for token in tokens] == ["[CLS]", "the", "Cat", "[SEP]"]
    assert [(token["start"], token["stop"]) for token in tokens] == [(None, None), (0, 3), (4, 7), (None, None)]
    (bare,) = embedder.post("/tokenize", {"inputs": "the Cat", "add_special_tokens": False}).json()
    assert bare == tokens[1:3]


def test_long_texts_are_tokenised_beside_the_event_loop(embedder: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    beside = asyncio.to_thread

    async def counted(function: Any, *arguments: Any) -> Any:
        threads.append(function)
        return await beside(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    (short,) = embedder.post("/tokenize", {"inputs": "a cat"}).json()
    (long,) = embedder.post("/tokenize", {"inputs": "a cat " * 2000}).json()
    assert len(threads) == 1 and len(long) - 2 == 2000 * (len(short) - 2)


def test_many_answers_about_tokens_are_made_beside_the_event_loop(artefact: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    server = InProcess({"m": artefact("token-classification")})
    seen: dict[int, set[bool]] = {}
    located = server.state.models["m"].predictor.located

    def watched(texts: Any, *others: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            seen.setdefault(len(texts), set()).add(True)
        else:
            seen.setdefault(len(texts), set()).add(False)
        return located(texts, *others)

    monkeypatch.setattr(server.state.models["m"].predictor, "located", watched)
    try:
        (one,) = server.post("/predict", {"inputs": [["the cat sat"]]}).json()
        many = server.post("/predict", {"inputs": [["the cat sat"]] * 300}).json()
    finally:
        server.close()
    assert seen == {1: {False}, 300: {True}}
    assert [[row["word"] for row in rows] for rows in many] == [[row["word"] for row in one]] * 300


def test_predict_gives_all_labels_best_first(classifier: InProcess, artefact: Artefact) -> None:
    expected = bertopt.load(artefact("text-classification"))(TEXTS)
    answers = classifier.post("/predict", {"inputs": [[text] for text in TEXTS]}).json()
    for one, best in zip(answers, expected, strict=True):
        assert one[0]["label"] == best["label"] and abs(one[0]["score"] - best["score"]) < 1e-6
        assert sorted(row["label"] for row in one) == ["bad", "good", "mixed"]
        assert [row["score"] for row in one] == sorted((row["score"] for row in one), reverse=True)
        assert abs(sum(row["score"] for row in one) - 1) < 1e-6
    assert classifier.post("/predict", {"inputs": TEXTS[0]}).json()[0]["label"] == expected[0]["label"]
    raw = classifier.post("/predict", {"inputs": TEXTS[0], "raw_scores": True}).json()
    logits = bertopt.load(artefact("text-classification")).logits([TEXTS[0]])[0]
    assert np.allclose(sorted(row["score"] for row in raw), sorted(logits), atol=1e-6)
    pair = classifier.post("/predict", {"inputs": ["a cat", "a dog"]}).json()
    assert pair[0]["label"] == bertopt.load(artefact("text-classification"))([("a cat", "a dog")])[0]["label"]


def test_scores_are_written_in_the_fewest_digits_of_a_float32(classifier: InProcess, tmp_path: Path) -> None:
    """As text-embeddings-inference writes its own: 0.12345679, not 0.12345679104328156."""
    ranker = InProcess({"ranker": write_artefact(write_tiny(tmp_path / "model", extra={"num_labels": 1}), tmp_path / "artifact")})
    asked = {"query": "a cat", "documents": TEXTS}
    try:
        answers = [classifier.post("/predict", {"inputs": [[text] for text in TEXTS], "raw_scores": raw}) for raw in (False, True)]
        answers += [ranker.post("/rerank", {"query": "a cat", "texts": TEXTS, "raw_scores": raw}) for raw in (False, True)]
        answers.append(ranker.post("/v1/rerank", asked))
    finally:
        ranker.close()
    for answer in answers:
        written = re.findall(r'score":([^,}]+)', answer.text)
        assert len(written) >= len(TEXTS) and [float(one) for one in written] == [float(str(np.float32(one))) for one in written]


@pytest.mark.parametrize("task", ["token-classification", "question-answering", "fill-mask"])
def test_predict_answers_about_tokens(task: str, artefact: Artefact) -> None:
    texts: list[Any] = ["the [MASK] sat on a [MASK]", "it was a dog [MASK]"]
    if task == "question-answering":
        texts = [("who sat ?", "the cat sat on the mat"), ("what ?", "a film")]
    expected = bertopt.load(artefact(task))(texts)
    server = InProcess({"m": artefact(task)})
    try:
        got = server.post("/predict", {"inputs": [[text] if isinstance(text, str) else list(text) for text in texts]}).json()
    finally:
        server.close()
    assert json.loads(json.dumps(expected), parse_float=lambda x: round(float(x), 5)) == json.loads(
        json.dumps(got), parse_float=lambda x: round(float(x), 5)
    )


def test_what_a_model_is_not_made_for_is_refused_with_the_reason(embedder: InProcess, classifier: InProcess) -> None:
    for server, path, body, words in (
        (embedder, "/predict", {"inputs": "a"}, "use /embed"), (embedder, "/rerank", {"query": "a", "texts": ["b"]}, "not a re-ranker"),
        (classifier, "/embed", {"inputs": "a"}, "not an embedding model"), (embedder, "/embed_sparse", {"inputs": "a"}, "SPLADE"),
    ):  # fmt: skip
        answer = server.post(path, body)
        assert answer.status_code == 424 and words in answer.json()["error"] and answer.json()["error_type"] == "Backend"


def test_sparse_embeddings(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_prompted_artefact(tiny("bert", "feature-extraction", "splade"), tmp_path / "sparse", query="the cat: ")
    predict = bertopt.load(directory)
    texts = [*TEXTS, "", "the dog sat " * 12]
    whole = predict.logits(texts)
    server = InProcess({"sparse": directory}, cache_bytes=1 << 20)

    def dense(rows: list[list[dict[str, Any]]]) -> np.ndarray:
        vectors = np.zeros_like(whole[: len(rows)])
        for vector, row in zip(vectors, rows, strict=True):
            assert [one["index"] for one in row] == sorted({one["index"] for one in row})
            for one in row:
                assert one.keys() == {"index", "value"} and one["value"] > 0
                vector[one["index"]] = one["value"]
        return vectors

    try:
        for _ in range(2):  # the second time from the cache
            for path in ("/embed_sparse", "/", "/models/sparse/embed_sparse"):
                assert np.abs(dense(server.post(path, {"inputs": texts}).json()) - whole).max() < 1e-6
        (one,) = server.post("/embed_sparse", {"inputs": TEXTS[0], "truncate": True}).json()
        assert [each["index"] for each in one] == predict([TEXTS[0]])[0]["indices"]
        together = server.together([("/embed_sparse", {"inputs": text}) for text in texts])
        assert np.abs(dense([answer.json()[0] for answer in together]) - whole).max() < 1e-6
        prompted = server.post("/embed_sparse", {"inputs": TEXTS, "prompt_name": "query"}).json()
        assert np.abs(dense(prompted) - predict.logits([f"the cat: {text}" for text in TEXTS])).max() < 1e-6
        tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
        (output,) = server.post("/v2/models/sparse/infer", {"inputs": [tensor]}).json()["outputs"]
        assert output["shape"] == list(whole.shape) and np.abs(np.reshape(output["data"], whole.shape) - whole).max() < 1e-6
        assert server.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
        for path, body in (("/embed", {"inputs": "a"}), ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}), ("/predict", {"inputs": "a"})):
            refused = server.post(path, body)
            assert refused.status_code == 424 and "/embed_sparse" in refused.json()["error"]
        refused = server.post("/v1/embeddings", {"input": "a"})
        assert refused.status_code == 400 and "use /embed_sparse" in refused.json()["error"]["message"]
    finally:
        server.close()


def test_rerank_in_cohere_s_shape(tmp_path: Path) -> None:
    directory = write_artefact(write_tiny(tmp_path / "model", extra={"num_labels": 1}), tmp_path / "artifact")
    expected = [bertopt.load(directory)([("a cat", text)])[0]["score"] for text in TEXTS]
    server = InProcess({"ranker": directory})
    try:
        asked = {"query": "a cat", "documents": [*TEXTS[:2], *({"text": text, "id": 7} for text in TEXTS[2:])], "model": "any"}
        answer = server.post("/v1/rerank", asked).json()
        assert answer["model"] == "ranker" and answer["usage"]["total_tokens"] > 4 * 6
        assert [row["index"] for row in answer["results"]] == sorted(range(4), key=lambda i: -expected[i])
        assert all(row["relevance_score"] == pytest.approx(expected[row["index"]], abs=1e-6) for row in answer["results"])
        same = server.post("/rerank", {"query": "a cat", "texts": TEXTS}).json()
        offline = bertopt.load(directory).rank("a cat", TEXTS)
        assert [row["index"] for row in offline] == [row["index"] for row in same]
        assert all(mine["score"] == pytest.approx(row["score"], abs=1e-6) for mine, row in zip(offline, same, strict=True))
        assert [(row["index"], row["score"]) for row in same] == [(row["index"], row["relevance_score"]) for row in answer["results"]]
        (best,) = server.post("/v2/rerank", {**asked, "top_n": 1, "return_documents": True}).json()["results"]
        assert best == {**answer["results"][0], "document": {"text": TEXTS[best["index"]]}}
        mine = {"query": "a cat", "texts": TEXTS}
        assert server.post("/rerank", {**mine, "top_n": 2}).json() == server.post("/", {**mine, "top_n": 2}).json() == same[:2]
        assert server.post("/rerank", {**mine, "top_n": None}).json() == server.post("/rerank", {**mine, "top_n": 99}).json() == same
        for path, body in (("/rerank", mine), ("/v1/rerank", asked), ("/v2/rerank", asked)):
            for top_n in ("2", True, 1.5, 0, [2]):
                refused = server.post(path, {**body, "top_n": top_n})
                assert refused.status_code == 422 and "top_n: input should be" in refused.text
        for wrong, field in (({"documents": []}, "documents"), ({"documents": [{"body": "a"}]}, "documents")):
            refused = server.post("/v1/rerank", {**asked, **wrong})
            assert refused.status_code == 422 and field in refused.text
    finally:
        server.close()


def test_openai_embeddings(embedder: InProcess, artefact: Artefact) -> None:
    expected = offline(artefact(), TEXTS)
    answer = embedder.post("/v1/embeddings", {"input": TEXTS, "model": "tiny"}).json()
    assert [row["index"] for row in answer["data"]] == [0, 1, 2, 3] and answer["model"] == "tiny"
    assert np.abs(np.array([row["embedding"] for row in answer["data"]]) - expected).max() < 1e-6
    coded = embedder.post("/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), expected[0])
    (listed,) = embedder.get("/v1/models").json()["data"]
    assert listed["id"] == "tiny" and embedder.get("/v1/models/tiny").json() == listed
    assert embedder.get("/v1/models/other").json()["error"]["type"] == "not_found_error"
    refused = embedder.post("/v1/embeddings", {"input": "a", "dimensions": 64})
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "dimensions"


@pytest.mark.parametrize("normalises", [True, False])
def test_the_first_numbers_of_embeddings(normalises: bool, tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("bert", "feature-extraction", "mean")
    if not normalises:
        source = without_normalize(source, tmp_path / "source")
    directory = write_artefact(source, tmp_path / "artifact")
    whole = offline(directory, TEXTS)
    cut = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    server = InProcess({"tiny": directory})
    try:
        rows = server.post("/v1/embeddings", {"input": TEXTS, "dimensions": 8}).json()["data"]
        assert np.abs(np.array([row["embedding"] for row in rows]) - cut).max() < 1e-6
        assert np.abs(np.array(server.post("/embed", {"inputs": TEXTS, "dimensions": 8}).json()) - cut).max() < 1e-6
        every = server.post("/embed", {"inputs": TEXTS, "dimensions": 32}).json()
        assert every == server.post("/embed", {"inputs": TEXTS}).json()
        raw = server.post("/embed", {"inputs": TEXTS, "dimensions": 8, "normalize": False})
        assert raw.status_code == (422 if normalises else 200)
        assert normalises or np.abs(np.array(raw.json()) - whole[:, :8]).max() < 1e-6
    finally:
        server.close()


def test_kserve(embedder: InProcess, artefact: Artefact) -> None:
    expected = offline(artefact(), TEXTS)
    tensor = {"name": "text", "shape": [4], "datatype": "BYTES", "data": TEXTS}
    answer = embedder.post("/v2/models/tiny/infer", {"id": "7", "inputs": [tensor]}).json()
    (output,) = answer["outputs"]
    assert answer["id"] == "7" and output["shape"] == [4, 32] and output["datatype"] == "FP32"
    assert np.abs(np.array(output["data"]).reshape(4, 32) - expected).max() < 1e-6
    assert all(number == float(str(np.float32(number))) for number in output["data"])  # no more digits than a float32 has
    assert embedder.get("/v2/health/live").status_code == embedder.get("/v2/health/ready").status_code == 200
    assert embedder.get("/v2/models/tiny").json()["outputs"][0]["shape"] == [-1, 32]
    assert embedder.get("/v2/models/other").status_code == 404
    wrong = embedder.post("/v2/models/tiny/infer", {"inputs": [{**tensor, "shape": [5]}]})
    assert wrong.status_code == 400 and "expected one that holds 4 texts; got [5]" in wrong.json()["error"]


def test_kserve_takes_versions_nested_data_and_pairs_by_name(embedder: InProcess, classifier: InProcess) -> None:
    """As metadata says versions ["1"], clients ask for it; data may be nested as its shape is."""
    flat = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["a cat", "the dog"]}
    nested = {**flat, "data": [["a cat"], ["the dog"]]}
    answers = [embedder.post(f"/v2/models/tiny{path}/infer", {"inputs": [one]}).json() for path in ("", "/versions/1") for one in (flat, nested)]
    assert all(answer == answers[0] for answer in answers) and answers[0]["outputs"][0]["shape"] == [2, 32]
    assert embedder.get("/v2/models/tiny/versions/1").json() == embedder.get("/v2/models/tiny").json()
    assert embedder.get("/v2/models/tiny/versions/1/ready").status_code == 200
    refused = embedder.post("/v2/models/tiny/versions/2/infer", {"inputs": [flat]})
    assert refused.status_code == 404 and "has version 1; got '2'" in refused.json()["error"]
    first, second = ({"name": name, "shape": [1], "datatype": "BYTES", "data": [text]} for name, text in (("text", "a cat"), ("text_pair", "dog")))
    pairs = [classifier.post("/v2/models/sentiment/infer", {"inputs": list(one)}).json()["outputs"] for one in ((first, second), (second, first))]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(("more", "words"), [
    ({"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [["a"]]}]}, "inputs[0].data: expected texts; got ['a']"),
    ({"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a", None]}]}, "inputs[0].data: expected texts; got None"),
    ({"outputs": [{"name": "logits"}]}, "outputs[0].name: expected 'sentence_embedding'; got 'logits'"),
])  # fmt: skip
def test_kserve_names_what_it_cannot_take_or_give(embedder: InProcess, more: dict[str, Any], words: str) -> None:
    answer = embedder.post("/v2/models/tiny/infer", {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}], **more})
    assert answer.status_code == 400 and words in answer.json()["error"]


def test_kserve_refuses_bytes_that_belong_to_no_tensor(embedder: InProcess) -> None:
    head = json.dumps({"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}]}).encode()
    for extra, status in ((b"", 200), (b"\1\0\0\0b", 400)):
        headers = {"Inference-Header-Content-Length": str(len(head))}
        assert embedder.post("/v2/models/tiny/infer", head + b"\1\0\0\0a" + extra, **headers).status_code == status


def test_info_says_what_was_proven(embedder: InProcess) -> None:
    told = embedder.get("/info").json()
    assert told["model_type"] == {"embedding": {"pooling": "mean"}} and told["max_input_length"] == 48
    assert told["bertopt"]["gates"]["parity"]["limits"] == {"max_abs": 0.001}
    assert told["bertopt"]["proven_on"]["cpu"] and told["bertopt"]["artefact_sha256"]


def test_several_artefacts_are_served_by_name(artefact: Artefact) -> None:
    server = InProcess({"embeddings": artefact(), "sentiment": artefact("text-classification")})
    try:
        assert len(server.post("/embed", {"inputs": "a"}).json()[0]) == 32
        assert server.post("/models/sentiment/predict", {"inputs": "a"}).json()[0]["label"]
        assert server.post("/v1/embeddings", {"input": "a", "model": "embeddings"}).status_code == 200
        assert server.post("/v1/embeddings", {"input": "a", "model": "no"}).status_code == 404
        assert "expected one of embeddings, sentiment" in server.post("/models/no/embed", {"inputs": "a"}).json()["error"]
    finally:
        server.close()


def test_openapi_names_every_route(embedder: InProcess) -> None:
    document = embedder.get("/openapi.json").json()
    routes = {(route.path, method.lower()) for route in embedder.app.routes for method in route.methods - {"HEAD"}}
    # The last one is for every other path.
    served = {each for each in routes if each[0] != "/{path:path}"}
    assert {(path, method) for path, methods in document["paths"].items() for method in methods} == served
    assert document["components"]["schemas"]["Embed"]["properties"]["inputs"]
    assert {"400", "408", "413", "415", "422", "429", "503", "504"} <= document["paths"]["/embed"]["post"]["responses"].keys()
    assert "503" in document["paths"]["/v2/health/ready"]["get"]["responses"]
