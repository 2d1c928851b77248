"""A model repository for Triton, and its `model.py` under the contract of Triton's Python backend.

No server of Triton runs here: `triton_python_backend_utils` is a stand-in written from the backend's documentation. What it does
not show: whether a real server parses `config.pbtxt`, and how it moves tensors.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import bertopt
from bertopt.cli import app
from bertopt.commands import deploy
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.serve.settings import default_name, named
from tests.unit.serve.conftest import Artefact


@dataclass
class Tensor:
    name: str
    values: Any

    def as_numpy(self) -> Any:
        return self.values


class TritonError:
    INVALID_ARG, INTERNAL = "INVALID_ARG", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None


Request = dict[str, Tensor]
Model = Callable[..., Any]


@pytest.fixture
def model(artefact: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return `open(task)`: a repository's model as the backend opens it."""
    stand_in = ModuleType("triton_python_backend_utils")
    for name, value in {
        "Tensor": Tensor, "TritonError": TritonError, "InferenceResponse": InferenceResponse,
        "get_input_tensor_by_name": lambda request, name: request.get(name),
    }.items():  # fmt: skip
        setattr(stand_in, name, value)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stand_in)

    def opened(task: str = "feature-extraction", how: AnswerOptions = DEFAULTS) -> Any:
        (folder,) = deploy.triton(artefact(task), tmp_path / "models", task, how=how)
        found = importlib.util.spec_from_file_location("triton_model", folder / "1" / "model.py")
        assert found and found.loader
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        one = module.TritonPythonModel()
        written = re.findall(r'^parameters { key: "(.*)" value: { string_value: "(.*)" } }$', (folder / "config.pbtxt").read_text(), re.MULTILINE)
        config = {"parameters": {name: {"string_value": value} for name, value in written}}
        arguments = {"model_repository": str(folder), "model_version": "1", "model_name": task, "model_instance_kind": "CPU"}
        one.initialize({**arguments, "model_config": json.dumps(config)})
        return one

    return opened


def request(*texts: str | bytes, pair: list[str] | None = None) -> Request:
    as_bytes = [text.encode() if isinstance(text, str) else text for text in texts]
    tensors = {"text": Tensor("text", np.array(as_bytes, object)[:, None])}
    if pair is not None:
        tensors["text_pair"] = Tensor("text_pair", np.array([text.encode() for text in pair], object)[:, None])
    return tensors


@pytest.mark.parametrize(("server", "numpy", "refused"), [("2.51.0", "2.4.6", True), ("2.52.0", "2.4.6", False), ("2.51.0", "1.26.4", False), ("", "2.4.6", False)])
def test_a_backend_that_misreads_arrays_refuses_the_model(
    server: str, numpy: str, refused: bool, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_SERVER_VERSION", server)
    monkeypatch.setattr(np, "__version__", numpy)
    if refused:
        with pytest.raises(Unsupported, match=r"Triton 2\.51\.0 cannot read arrays of numpy 2\.4\.6: use Triton 24\.11"):
            model()
    else:
        model()


@pytest.mark.parametrize(("task", "how"), [
    ("token-classification", AnswerOptions(aggregation_strategy="first", stride=8)), ("token-classification", AnswerOptions(aggregation_strategy="max")),
    ("question-answering", AnswerOptions(stride=8)), ("question-answering", DEFAULTS),
])  # fmt: skip
def test_long_texts_and_entities(task: str, how: AnswerOptions, model: Model, artefact: Artefact) -> None:
    long = "the cat sat on the mat . " * 20
    texts, pairs = (["who sat ?"] * 2, ["the cat", long]) if task == "question-answering" else (["the cat", long], None)
    (response,) = model(task, how).execute([request(*texts, pair=pairs)])
    asked = list(zip(texts, pairs, strict=True)) if pairs else texts
    expected = bertopt.load(artefact(task))(asked, aggregation_strategy=how.aggregation_strategy, stride=how.stride)
    assert [json.loads(one) for one in response.output_tensors[0].values[:, 0]] == expected


@pytest.mark.parametrize(("task", "how", "said"), [
    ("feature-extraction", AnswerOptions(stride=8), "stride goes with"),
    ("token-classification", AnswerOptions(stride=8), "stride goes with entities"),
    ("token-classification", AnswerOptions(stride=99, aggregation_strategy="max"), "less than the 62 tokens"),
])  # fmt: skip
def test_options_that_the_task_does_not_have(task: str, how: AnswerOptions, said: str, model: Model) -> None:
    with pytest.raises(UsageError, match=said):
        model(task, how)


def test_a_stride_that_is_no_number(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "_PARAMETER", 'parameters {{ key: "{key}" value: {{ string_value: "-{value}" }} }}\n')
    with pytest.raises(UsageError, match=r"config\.pbtxt: stride must be a whole number of tokens from 0; got '-8'"):
        model("question-answering", AnswerOptions(stride=8))


def test_each_answer_is_right_whatever_requests_are_merged(model: Model, artefact: Artefact) -> None:
    rng = random.Random(4)
    texts = [" ".join(rng.choices(("cat", "mat", "the", "sat", "über"), k=rng.randint(1, 30))) + f" {i}" for i in range(60)]
    predictor, served, left = bertopt.load(artefact()), model(), list(range(60))
    known = np.concatenate([predictor([text]) for text in texts])
    answered = 0
    while left:
        merged = [[left.pop() for _ in range(min(len(left), rng.randint(1, 5)))] for _ in range(rng.randint(1, 6)) if left]
        responses = served.execute([request(*(texts[i] for i in numbers)) for numbers in merged])
        assert len(responses) == len(merged)
        for numbers, response in zip(merged, responses, strict=True):
            (tensor,) = response.output_tensors
            assert (response.error, tensor.name, tensor.values.dtype) == (None, predictor.spec.outputs[0], np.float32)
            np.testing.assert_allclose(tensor.values, known[numbers], atol=1e-5)
            answered += len(numbers)
    assert answered == 60


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(b"\xff"), "UTF-8"),
        (request("a", "b", pair=["c"]), "as many"),
        ({}, "'text'"),
        ({"text": Tensor("text", np.zeros((0, 1), object))}, "at least one"),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_an_error_and_its_neighbours_their_answers(model: Model, wrong: Request, message: str) -> None:
    served = model()
    alone = [served.execute([request(text)])[0].output_tensors[0].values for text in ("one", "two words")]
    first, refused, last = served.execute([request("one"), wrong, request("two words")])
    assert refused.error.code == "INVALID_ARG" and message in refused.error.message and not refused.output_tensors
    np.testing.assert_allclose(first.output_tensors[0].values, alone[0], atol=1e-5)
    np.testing.assert_allclose(last.output_tensors[0].values, alone[1], atol=1e-5)


def test_a_failing_model_fails_each_request_without_a_stack(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    served = model()

    def fails(texts: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(served._predictor, "logits", fails)
    responses = served.execute([request("a"), request(b"\xff"), request("b")])
    assert [one.error.code for one in responses] == ["INTERNAL", "INVALID_ARG", "INTERNAL"]
    assert not [one for one in responses if "secret" in one.error.message]


@pytest.mark.parametrize("task", ["feature-extraction", "token-classification"])
def test_outputs_that_are_not_finite_are_an_error_of_their_request_alone(task: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    served = model(task)
    name = "logits" if task == "feature-extraction" else "__call__"
    right = getattr(served._predictor, name)

    class Spoilt:
        spec = served._predictor.spec

        def logits(self, texts: list[str]) -> Any:
            return np.array([row * np.nan if text == "bad" else row for text, row in zip(texts, right(texts), strict=True)])

        def __call__(self, texts: list[str]) -> Any:
            return [[{"score": float("nan")}] if text == "bad" else one for text, one in zip(texts, right(texts), strict=True)]

    monkeypatch.setattr(served, "_predictor", Spoilt())
    good, bad = served.execute([request("a cat"), request("the dog", "bad")])
    assert len(good.output_tensors[0].values) == 1
    assert good.error is None and bad.error.code == "INTERNAL" and "not finite" in bad.error.message


def test_pairs_and_answers_about_tokens(model: Model, artefact: Artefact) -> None:
    pairs = model("text-classification")
    (response,) = pairs.execute([request("the cat", "a mat", pair=["sat", "the mat"])])
    wanted = bertopt.load(artefact("text-classification")).logits([("the cat", "sat"), ("a mat", "the mat")])
    np.testing.assert_allclose(response.output_tensors[0].values, wanted, atol=1e-5)
    (response,) = model("token-classification").execute([request("the cat", "mat")])
    (tensor,) = response.output_tensors
    answers = [json.loads(one) for one in tensor.values.ravel()]
    right = bertopt.load(artefact("token-classification"))(["the cat", "mat"])
    assert tensor.name == "answers" and [[t["word"] for t in one] for one in answers] == [[t["word"] for t in one] for one in right]


def test_the_configuration_says_what_the_model_takes_and_gives(artefact: Artefact, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["deploy", "triton", str(artefact()), str(tmp_path), "--name", "embed", "--max-batch", "32"])
    assert found.exit_code == 0, found.output
    text = (tmp_path / "embed" / "config.pbtxt").read_text()
    spec = bertopt.load(artefact()).spec
    for line in ('name: "embed"', 'backend: "python"', "max_batch_size: 32", "dynamic_batching", "KIND_CPU",
                 f'name: "{spec.outputs[0]}" data_type: TYPE_FP32 dims: [ {spec.hidden} ]'):  # fmt: skip
        assert line in text
    assert re.findall(r"TYPE_STRING dims: \[ 1 \](.*?) \}", text) == ["", " optional: true"]
    assert text.count("{") == text.count("}") and text.count("[") == text.count("]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["embed"]


@pytest.mark.parametrize(("form", "backend", "files"), [
    ("onnx", "onnxruntime", ["model.onnx"]), ("openvino", "openvino", ["model.bin", "model.xml"]),
])  # fmt: skip
@pytest.mark.parametrize("task", ["feature-extraction", "token-classification", "question-answering"])
def test_the_graph_alone_is_described_as_it_is(form: str, backend: str, files: list[str], task: str, artefact: Artefact, tmp_path: Path) -> None:
    """OpenVINO reads both formats, so it says what the written file takes and gives."""
    openvino = pytest.importorskip("openvino")
    _, folder = deploy.triton(artefact(task, form), tmp_path, "embed", graph=True)
    text = (folder / "config.pbtxt").read_text()
    assert f'name: "embed_graph"\nbackend: "{backend}"' in text and sorted(path.name for path in (folder / "1").iterdir()) == files
    graph = openvino.Core().read_model(folder / "1" / files[-1])
    said = re.findall(r'name: "(\w+)" data_type: (\w+) dims: \[ ([-\d, ]+) \]', text)
    types, ports = {"i64": "TYPE_INT64", "f32": "TYPE_FP32"}, {}
    for port in (*graph.inputs, *graph.outputs):
        dims = [-1 if one.is_dynamic else one.get_length() for one in port.partial_shape]
        assert dims[0] == -1
        ports.update(dict.fromkeys(port.names, (types[port.element_type.get_type_name()], ", ".join(map(str, dims[1:])))))
    assert [ports[name] for name, *_ in said] == [(kind, dims) for _, kind, dims in said]
    # An embedding's graph also gives the hidden states, which need not be described.
    assert len(said) == len(graph.inputs) + len(graph.outputs) - (task == "feature-extraction")


def test_a_graph_that_is_none_is_refused(artefact: Artefact, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="padded graphs of onnx, openvino, engine; got padded eager: leave out --graph"):
        deploy.triton(artefact(form="eager"), tmp_path, "embed", graph=True)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_and_leaves_nothing(artefact: Artefact, tmp_path: Path) -> None:
    deploy.triton(artefact(), tmp_path, "there")
    with pytest.raises(UsageError, match="is there already"):
        deploy.triton(artefact(), tmp_path, "there")
    for name in ("a/b", "..", 'a"b'):
        with pytest.raises(UsageError, match="name"):
            deploy.triton(artefact(), tmp_path, name)
    damaged = tmp_path / "there" / "1" / "artifact"
    (damaged / "config.json").write_text("{}")
    with pytest.raises(IntegrityError):
        deploy.triton(damaged, tmp_path, "other")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(("directory", "name"), [("minilm/artifact", "minilm"), ("minilm/stages/sdpa-01", "sdpa-01"), ("/artifact", "artifact")])
def test_the_default_name_is_that_of_the_server(directory: str, name: str, tmp_path: Path) -> None:
    assert default_name(tmp_path / directory) == name
    assert list(named([str(tmp_path / directory)])) == [name]


def test_a_delivered_artefact_is_called_as_its_run(artefact: Artefact, tmp_path: Path) -> None:
    delivered = shutil.copytree(artefact(), tmp_path / "minilm" / "artifact")
    assert deploy.triton(delivered, tmp_path / "models") == [tmp_path / "models" / "minilm"]
