"""`bertopt serve` with the client libraries that people use. Those that the extra `test` does not bring are in
requirements-clients.txt beside this file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import bertopt
from tests.support.artefacts import write_artefact
from tests.support.nli import write_nli
from tests.support.serving import Served
from tests.support.tiny_models import Tiny

TEXTS = ["a cat sat", "the dog ran very fast", "a good film"]


@pytest.fixture(scope="module")
def directories(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    return {
        "embeddings": write_artefact(tiny(task="feature-extraction", pooling="mean"), folder / "embeddings"),
        "sentiment": write_artefact(tiny(), folder / "sentiment"),
        "tags": write_artefact(tiny(task="token-classification"), folder / "tags"),
        "reader": write_artefact(tiny(task="question-answering"), folder / "reader"),
        "filler": write_artefact(tiny(task="fill-mask"), folder / "filler"),
        "nli": write_artefact(write_nli(folder / "checkpoint"), folder / "nli"),
    }


@pytest.fixture(scope="module")
def served(directories: dict[str, Path]) -> Iterator[Served]:
    one = Served(*(str(directory) for directory in directories.values()))
    yield one
    one.end()


@pytest.fixture(scope="module")
def sentiment(directories: dict[str, Path]) -> Iterator[Served]:
    one = Served(str(directories["sentiment"]))
    yield one
    one.end()


@pytest.fixture(scope="module")
def vectors(directories: dict[str, Path]) -> np.ndarray:
    predict = bertopt.load(directories["embeddings"])
    return np.concatenate([predict([text]) for text in TEXTS])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(served: Served, vectors: np.ndarray) -> None:
    """The line of the README of an artefact: no header says what the body is."""
    asked = ["curl", "-s", f"{served.url}/embed", "-d", json.dumps({"inputs": TEXTS})]
    answer = json.loads(subprocess.run(asked, capture_output=True, check=True, timeout=60).stdout)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(np.asarray(answer) - unit).max() < 1e-6
    refused = [*asked[:2], "-o", "-", "-w", "%{http_code}", *asked[2:4], '{"inputs": []}']
    assert subprocess.run(refused, capture_output=True, check=True, text=True, timeout=60).stdout.endswith("}422")


def test_openai(served: Served, vectors: np.ndarray) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    answer = client.embeddings.create(model="embeddings", input=TEXTS)
    assert np.abs(np.array([row.embedding for row in answer.data]) - vectors).max() < 1e-6
    (cut,) = client.embeddings.create(model="embeddings", input=TEXTS[0], dimensions=3).data
    assert np.abs(np.array(cut.embedding) - vectors[0, :3] / np.linalg.norm(vectors[0, :3])).max() < 1e-6
    with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
        client.embeddings.create(model="embeddings", input="a", dimensions=10**4)


def test_hugging_face_embeddings(served: Served, vectors: np.ndarray) -> None:
    client = pytest.importorskip("huggingface_hub").InferenceClient(model=served.url)
    assert np.abs(np.asarray(client.feature_extraction(TEXTS[0])).ravel() - vectors[0]).max() < 1e-6
    assert np.abs(np.asarray(client.feature_extraction(TEXTS)) - vectors).max() < 1e-6


def test_hugging_face_similarity(served: Served, vectors: np.ndarray) -> None:
    client = pytest.importorskip("huggingface_hub").InferenceClient(model=f"{served.url}/similarity")
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    got = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    assert np.abs(np.asarray(got) - unit[1:] @ unit[0]).max() < 1e-6


def test_hugging_face_classification(sentiment: Served, directories: dict[str, Path]) -> None:
    rows = pytest.importorskip("huggingface_hub").InferenceClient(model=sentiment.url).text_classification(TEXTS[2])
    best = bertopt.load(directories["sentiment"])([TEXTS[2]])[0]
    assert rows[0].label == best["label"] and abs(rows[0].score - best["score"]) < 1e-6


def test_hugging_face_tokens(served: Served, directories: dict[str, Path]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    long = " ".join(TEXTS * 20)
    found = hub.InferenceClient(model=f"{served.url}/models/tags/predict").token_classification(long, aggregation_strategy="simple", stride=8)
    expected = bertopt.load(directories["tags"])([long], aggregation_strategy="simple", stride=8)[0]
    assert [(one.entity_group, one.word, one.start) for one in found] == [(one["entity_group"], one["word"], one["start"]) for one in expected]
    asked = {"question": "who sat ?", "context": long}
    answer = hub.InferenceClient(model=f"{served.url}/models/reader/predict").question_answering(**asked, doc_stride=8)
    best = bertopt.load(directories["reader"])([tuple(asked.values())], stride=8)[0]
    assert (answer.answer, answer.start, answer.end) == (best["answer"], best["start"], best["end"])


def test_hugging_face_zero_shot(served: Served, directories: dict[str, Path]) -> None:
    hub = pytest.importorskip("huggingface_hub")
    labels, template = ["film", "cat", "dog"], "the {} was good ."
    rows = hub.InferenceClient(model=f"{served.url}/models/nli/predict").zero_shot_classification(TEXTS[2], labels, multi_label=True, hypothesis_template=template)
    expected = bertopt.load(directories["nli"]).zero_shot([TEXTS[2]], labels, template, multi_label=True)[0]
    assert [(one.label, round(one.score, 5)) for one in rows] == [(one["label"], round(one["score"], 5)) for one in expected]


def test_hugging_face_masks(directories: dict[str, Path]) -> None:
    """A client gives the server's address alone, and reads a list of tokens where the text has one mask."""
    hub = pytest.importorskip("huggingface_hub")
    server = Served(str(directories["filler"]))
    try:
        rows = hub.InferenceClient(model=server.url).fill_mask("the [MASK] sat", top_k=3)
    finally:
        server.end()
    expected = bertopt.load(directories["filler"])(["the [MASK] sat"], top_k=3)[0][0]
    assert [(one.token, one.token_str) for one in rows] == [(one["token"], one["token_str"]) for one in expected]
    assert all(one.sequence.startswith("the") for one in rows)


def test_langchain(served: Served, vectors: np.ndarray) -> None:
    langchain = pytest.importorskip("langchain_huggingface", reason="pip install -r tests/end_to_end/requirements-clients.txt")
    from huggingface_hub import InferenceClient

    embeddings = langchain.HuggingFaceEndpointEmbeddings()
    embeddings.client = InferenceClient(model=served.url)  # the constructor wants a name on the Hub, no URL
    assert np.abs(np.asarray(embeddings.embed_documents(TEXTS)) - vectors).max() < 1e-6
    assert np.abs(np.asarray(embeddings.embed_query(TEXTS[1])) - vectors[1]).max() < 1e-6


def triton() -> Any:
    return pytest.importorskip("tritonclient.http", reason="pip install -r tests/end_to_end/requirements-clients.txt")


def tensor(name: str, texts: list[str], binary: bool) -> Any:
    one = triton().InferInput(name, [len(texts)], "BYTES")
    one.set_data_from_numpy(np.array([text.encode() for text in texts], np.object_), binary_data=binary)
    return one


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [None, True, False])
def test_triton_s_client(served: Served, vectors: np.ndarray, binary_in: bool, binary_out: bool | None) -> None:
    """By default it sends and asks for binary tensors."""
    http = triton()
    client = http.InferenceServerClient(served.url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("embeddings")
    described = client.get_model_metadata("embeddings")
    name = described["outputs"][0]["name"]
    outputs = None if binary_out is None else [http.InferRequestedOutput(name, binary_data=binary_out)]
    result = client.infer("embeddings", [tensor("text", TEXTS, binary_in)], outputs=outputs, request_id="7")
    got = result.as_numpy(name)
    assert got.dtype == np.float32 and np.abs(got - vectors).max() < 1e-6
    assert result.get_response()["id"] == "7"


@pytest.mark.parametrize("binary", [True, False])
def test_triton_s_client_gets_texts(served: Served, directories: dict[str, Path], binary: bool) -> None:
    http = triton()
    client = http.InferenceServerClient(served.url.removeprefix("http://"))
    outputs = [http.InferRequestedOutput("answers", binary_data=binary)]
    got = client.infer("tags", [tensor("text", TEXTS, True)], outputs=outputs).as_numpy("answers")
    assert [len(one) for one in got.tolist()] and len(got) == len(TEXTS)


def test_triton_s_client_sees_errors(served: Served) -> None:
    http = triton()
    client = http.InferenceServerClient(served.url.removeprefix("http://"))
    with pytest.raises(pytest.importorskip("tritonclient.utils").InferenceServerException, match="model"):
        client.infer("nothing", [tensor("text", TEXTS, True)])


@pytest.mark.parametrize(("head", "length", "said"), [
    (b"{}", "x", "Inference-Header-Content-Length"),
    (b"{}", "100", "Inference-Header-Content-Length"),
    (b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":8}}]}', None, "inputs[0]"),
    (b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":4}}]}\xff\xff\xff\xff', None, "inputs[0]"),
    (b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":5}}]}\x01\0\0\0\xff', None, "inputs[0]"),
    (b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":-4}}]}\x01\0\0\0a', None, "inputs[0]"),
])  # fmt: skip
def test_damaged_binary_tensors_are_refused(served: Served, head: bytes, length: str | None, said: str) -> None:
    size = length or str(head.index(b"]}") + 2)
    answer = httpx.post(f"{served.url}/v2/models/embeddings/infer", content=head, headers={"Inference-Header-Content-Length": size})
    assert answer.status_code == 400 and said in answer.json()["error"]
