"""`parameters` of `/predict`, `/` and KServe: what Hugging Face's clients say of a task."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import bertopt
from bertopt.errors import UsageError
from bertopt.runtime import windows
from bertopt.runtime.tokenization import MOST_STRIDES
from tests.support.artefacts import write_artefact
from tests.support.nli import write_nli
from tests.support.serving import InProcess
from tests.support.tiny_models import Tiny
from tests.unit.serve.conftest import Artefact

#: A tiny model takes 64 tokens.
LONG = "the cat sat on the mat . a good film was bad " * 20
TEXTS = ["the cat sat", LONG, "", "good " * 70]
PAIRS = [("who sat ?", text) for text in TEXTS[:2]] + [("good ?", TEXTS[3])]


@pytest.fixture(scope="module")
def tagger(artefact: Artefact) -> Iterator[InProcess]:
    server = InProcess({"tags": artefact("token-classification")}, queue_tokens=20_000)
    yield server
    server.close()


@pytest.fixture(scope="module")
def reader(artefact: Artefact) -> Iterator[InProcess]:
    server = InProcess({"reader": artefact("question-answering")})
    yield server
    server.close()


@pytest.fixture(scope="module")
def filler(artefact: Artefact) -> Iterator[InProcess]:
    server = InProcess({"filler": artefact("fill-mask")})
    yield server
    server.close()


def truncated(server: InProcess) -> float:
    (found,) = re.findall(r"^bertopt_truncated_texts_total{.*} (.*)$", server.get("/metrics").text, re.MULTILINE)
    return float(found)


def close(got: Any, expected: Any) -> None:
    """Answers are alike but for rounding."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(other, list):
            close(one, other)
        else:
            assert one == {**other, "score": pytest.approx(other["score"], abs=1e-6)}


@pytest.mark.parametrize("parameters", [
    {"aggregation_strategy": "simple"}, {"aggregation_strategy": "first", "stride": 13}, {"aggregation_strategy": "max", "stride": 0}, {},
])  # fmt: skip
def test_entities(tagger: InProcess, artefact: Artefact, parameters: dict[str, Any]) -> None:
    predict = bertopt.load(artefact("token-classification"))
    expected = [predict([text], **parameters)[0] for text in TEXTS]
    before = truncated(tagger)
    answer = tagger.post("/predict", {"inputs": [[text] for text in TEXTS], "parameters": parameters})
    assert answer.status_code == 200, answer.text
    close(answer.json(), expected)
    assert truncated(tagger) - before == (0 if "stride" in parameters else 2)
    close(tagger.post("/", {"inputs": LONG, "parameters": parameters}).json(), expected[1])
    tensor = {"name": "text", "shape": [len(TEXTS)], "datatype": "BYTES", "data": TEXTS}
    outputs = tagger.post("/v2/models/tags/infer", {"inputs": [tensor], "parameters": {"binary_data_output": False, **parameters}}).json()["outputs"]
    close([json.loads(one) for one in outputs[0]["data"]], expected)


def test_labels_that_are_ignored(tagger: InProcess, artefact: Artefact) -> None:
    predict = bertopt.load(artefact("token-classification"))
    for strategy, key in (("none", "entity"), ("simple", "entity_group")):
        every = predict([LONG], aggregation_strategy=strategy)[0]
        label = every[0][key]
        parameters = {"ignore_labels": [label, "O"], "aggregation_strategy": strategy}
        got = tagger.post("/predict", {"inputs": LONG, "parameters": parameters}).json()
        close(got, [one for one in every if one[key] not in (label, "O")])
        assert len(got) < len(every)
    # As in transformers' pipeline: a list that lacks "O" brings it in.
    got = tagger.post("/predict", {"inputs": LONG, "parameters": {"ignore_labels": [], "aggregation_strategy": "simple"}}).json()
    assert {one["entity_group"] for one in got} >= {one["entity_group"] for one in every}


@pytest.mark.parametrize("stride", [{"doc_stride": 20}, {"stride": 5}, {}])
def test_questions(reader: InProcess, artefact: Artefact, stride: dict[str, int]) -> None:
    predict = bertopt.load(artefact("question-answering"))
    expected = [predict([pair], stride=next(iter(stride.values()), None))[0] for pair in PAIRS]
    asked = [{"question": question, "context": context} for question, context in PAIRS]
    close(reader.post("/predict", {"inputs": asked, "parameters": stride}).json(), expected)
    close(reader.post("/predict", {"inputs": PAIRS, "parameters": stride}).json(), expected)
    # The values that bertopt has are no mistakes.
    same = {"top_k": 1, "max_answer_len": 15, "align_to_words": False, "handle_impossible_answer": False}
    close([reader.post("/", {"inputs": asked[1], "parameters": {**stride, **same}}).json()], expected[1:2])


def test_pairs_by_name(classifier: InProcess) -> None:
    pairs = [["a cat", "the mat"], ["good", "bad"]]
    named = [{"text": one, "text_pair": other} for one, other in pairs]
    expected = classifier.post("/predict", {"inputs": pairs}).json()
    assert classifier.post("/predict", {"inputs": named}).json() == expected
    assert classifier.post("/predict", {"inputs": [named[0], pairs[1]]}).json() == expected
    assert classifier.post("/predict", {"inputs": named[0]}).json() == expected[0]


def test_one_mask(filler: InProcess, tiny: Tiny) -> None:
    import transformers

    text = "the [MASK] sat on the mat"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = transformers.pipeline("fill-mask", str(tiny(task="fill-mask")), device="cpu", top_k=7)(text)
    close(filler.post("/", {"inputs": text, "parameters": {"top_k": 7}}).json(), expected)
    without = [{key: value for key, value in one.items() if key != "sequence"} for one in expected]
    close(filler.post("/predict", {"inputs": text, "parameters": {"top_k": 7}}).json(), [without])
    assert len(filler.post("/", {"inputs": text}).json()) == 5
    both = filler.post("/", {"inputs": "the [MASK] sat on [MASK] mat", "parameters": {"top_k": 2}}).json()
    assert [sorted(one) for mask in both for one in mask] == [["score", "token", "token_str"]] * 4
    assert filler.post("/", {"inputs": "no mask"}).json() == []


def test_labels(classifier: InProcess, tiny: Tiny) -> None:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = transformers.pipeline("text-classification", str(tiny()), device="cpu")
        for function in ("sigmoid", "softmax", "none"):
            for top_k in (1, 2, None):
                expected = pipeline("a good film", function_to_apply=function, top_k=top_k)
                parameters = {"function_to_apply": function, "top_k": top_k}
                close(classifier.post("/", {"inputs": "a good film", "parameters": parameters}).json()[0], expected)


@pytest.mark.parametrize(("task", "parameters", "said"), [
    ("tags", {"aggregation_strategy": "best"}, "aggregation_strategy"),
    ("tags", {"stride": 5}, "parameters.stride goes with entities"),
    ("tags", {"stride": 62, "aggregation_strategy": "simple"}, "stride must be less than the 62 tokens"),
    ("tags", {"stride": -1, "aggregation_strategy": "simple"}, "parameters.stride must be a whole number"),
    ("tags", {"stride": "5", "aggregation_strategy": "simple"}, "parameters.stride"),
    ("tags", {"doc_stride": 5}, "parameters.doc_stride goes with question-answering; the model's task is token-classification"),
    ("tags", {"top_k": 5}, "parameters.top_k goes with text-classification and fill-mask"),
    ("tags", {"function_to_apply": "none"}, "parameters.function_to_apply goes with text-classification"),
    ("reader", {"align_to_words": True}, "parameters.align_to_words: expected false; got True: leave it out"),
    ("reader", {"max_answer_len": 30}, "parameters.max_answer_len: expected 15; got 30"),
    ("reader", {"max_seq_len": 384}, "parameters.max_seq_len: expected none; got 384"),
    ("reader", {"stride": 5, "doc_stride": 5}, "parameters.doc_stride is another name of stride"),
    ("reader", {"top_k": 3}, "parameters.top_k goes with"),
    ("reader", {"ignore_labels": ["O"]}, "parameters.ignore_labels goes with token-classification"),
    ("filler", {"top_k": 101}, "parameters.top_k: expected at most 100; got 101"),
    ("filler", {"top_k": 0}, "parameters.top_k must be a whole number from 1"),
    ("filler", {"targets": ["cat"]}, "parameters.targets: expected none; got ['cat']: leave it out"),
])  # fmt: skip
def test_parameters_that_are_refused(
    tagger: InProcess, reader: InProcess, filler: InProcess, task: str, parameters: dict[str, Any], said: str
) -> None:
    server = {"tags": tagger, "reader": reader, "filler": filler}[task]
    inputs: Any = {"question": "who sat ?", "context": LONG} if task == "reader" else LONG
    refused = server.post("/predict", {"inputs": inputs, "parameters": parameters})
    assert refused.status_code == 422 and said in refused.json()["error"], refused.text
    columns = [inputs["question"], inputs["context"]] if task == "reader" else [LONG]
    tensors = [{"name": f"text{number}", "shape": [1], "datatype": "BYTES", "data": [one]} for number, one in enumerate(columns)]
    refused = server.post(f"/v2/models/{task}/infer", {"inputs": tensors, "parameters": parameters})
    assert refused.status_code == 422 and said in refused.json()["error"], refused.text


def test_windows_of_more_tokens_than_may_wait_are_never_made(tagger: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stride of all tokens but one, each token of a text begins a window."""
    (model,) = tagger.state.models.values()

    def made(*_: Any) -> Any:
        raise AssertionError("windows were made")

    whole = {"inputs": LONG * 20, "parameters": {"aggregation_strategy": "simple", "stride": 10}}
    assert tagger.post("/predict", whole).status_code == 200
    monkeypatch.setattr(model.predictor.tokenizer, "windows", made)
    refused = tagger.post("/predict", {**whole, "parameters": {"aggregation_strategy": "simple", "stride": 61}})
    assert refused.status_code == 422 and "expected at most 20000" in refused.json()["error"] and "inputs[0]" in refused.json()["error"]


def test_the_tokens_of_windows_are_counted_before_they_are_made(artefact: Artefact) -> None:
    for task, text in (("token-classification", LONG), ("question-answering", ("who sat ?", LONG))):
        predict = bertopt.load(artefact(task))
        for stride in (0, 1, 30, 50):
            split = windows.split(predict.tokenizer, [text], predict.task, stride, True)
            tokens = int(split.encoded.lengths.sum())
            # The last window may be shorter.
            with pytest.raises(UsageError, match=rf"expected at most {tokens - 1}\b"):
                windows.split(predict.tokenizer, [text], predict.task, stride, True, most=tokens - 1)
            windows.split(predict.tokenizer, [text], predict.task, stride, True, most=tokens + predict.tokenizer.limit)


def test_few_tokenizers_stay_for_the_strides_that_clients_send(artefact: Artefact) -> None:
    predict = bertopt.load(artefact("token-classification"))
    for stride in range(20):
        predict([LONG], aggregation_strategy="simple", stride=stride)
    assert len(predict.tokenizer._windowed) == MOST_STRIDES


@pytest.fixture(scope="module")
def entailing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InProcess, bertopt.Predictor]]:
    directory = write_artefact(write_nli(tmp_path_factory.mktemp("nli")), tmp_path_factory.mktemp("served") / "nli", "onnx")
    server = InProcess({"nli": directory}, request_texts=12)
    yield server, bertopt.load(directory)
    server.close()


@pytest.mark.parametrize("options", [{}, {"multi_label": True}, {"multi_label": False, "hypothesis_template": "the {} ran ."}])
def test_zero_shot(entailing: tuple[InProcess, bertopt.Predictor], options: dict[str, Any]) -> None:
    server, model = entailing
    labels = ["film", "cat", "very bad"]
    expected = model.zero_shot(TEXTS, labels, **options)
    parameters = {"candidate_labels": labels, **options, "top_k": None, "max_answer_len": 15}
    for path in ("/predict", "/"):
        answer = server.post(path, {"inputs": [[text] for text in TEXTS], "parameters": parameters})
        assert answer.status_code == 200, answer.text
        close(answer.json(), expected)
        close(server.post(path, {"inputs": LONG, "parameters": parameters}).json(), expected[1])


@pytest.mark.parametrize(
    ("inputs", "parameters", "expected"),
    [
        ("a", {"candidate_labels": []}, "parameters.candidate_labels: expected at least one label"),
        ("a", {"candidate_labels": "film"}, "parameters.candidate_labels: "),
        ("a", {"candidate_labels": ["film", 1]}, "parameters.candidate_labels.1: "),
        ("a", {"candidate_labels": ["film"], "hypothesis_template": "{:>1000000000}"}, "parameters.hypothesis_template must have one {}"),
        ("a", {"candidate_labels": ["cat " * 40]}, "parameters.candidate_labels[0]: a hypothesis may have at most 30 tokens"),
        ("a", {"candidate_labels": ["film"], "top_k": 1}, "parameters.top_k does not go with candidate_labels"),
        ("a", {"candidate_labels": ["film"], "stride": 3}, "parameters.stride does not go with candidate_labels"),
        ("a", {"multi_label": True}, "parameters.multi_label goes with candidate_labels, for / and /predict"),
        (["a", "b"], {"candidate_labels": ["film"]}, "inputs[0]: expected one text; got a pair"),
        ([["a"]] * 5, {"candidate_labels": ["film", "cat", "dog"]}, "parameters.candidate_labels: texts times labels may be at most 12; got 5 × 3"),
    ],
)
def test_zero_shot_that_cannot_be(entailing: tuple[InProcess, bertopt.Predictor], inputs: Any, parameters: dict[str, Any], expected: str) -> None:
    server, _ = entailing
    for path in ("/predict", "/"):
        answer = server.post(path, {"inputs": inputs, "parameters": parameters})
        assert answer.status_code == 422 and answer.json()["error"].startswith(expected), answer.text


def test_zero_shot_of_other_models_and_routes(entailing: tuple[InProcess, bertopt.Predictor], classifier: InProcess, tagger: InProcess) -> None:
    parameters = {"candidate_labels": ["film"]}
    for server in (classifier, tagger):
        answer = server.post("/predict", {"inputs": "a", "parameters": parameters})
        assert answer.status_code == 422 and "needs a classifier of natural language inference" in answer.json()["error"], answer.text
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    for server, name in ((entailing[0], "nli"), (tagger, "tags")):
        answer = server.post(f"/v2/models/{name}/infer", {"inputs": [tensor], "parameters": parameters})
        assert answer.status_code == 422 and "candidate_labels" in answer.json()["error"], answer.text
    answer = entailing[0].post("/predict", {"inputs": "a", "parameters": parameters, "raw_scores": True})
    assert answer.status_code == 422 and answer.json()["error"].startswith("raw_scores: ")
