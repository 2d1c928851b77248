"""`bertopt.load`: what it refuses, most of it before a file is read, and what the predictor says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.errors import Unsupported, UsageError
from bertopt.system import machine
from tests.support.artefacts import Form, write_artefact
from tests.support.tiny_models import Tiny


@pytest.mark.parametrize("name", ["threads", "streams"])
@pytest.mark.parametrize("value", [0, -1, "2", 1.5, True, 10**6])
def test_threads_and_streams_are_counts(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} must be a whole number from 1 to 1024; got"):
        bertopt.load(tmp_path, **{name: value})


def test_streams_share_the_threads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="99 streams for 1 threads"):
        bertopt.load(tmp_path, threads=1, streams=99)


@pytest.mark.parametrize("form", ["eager", "onnx", "openvino"])
def test_without_a_gpu_the_argument_is_named(form: Form, tiny: Tiny, tmp_path: Path) -> None:
    if form != "eager":
        pytest.importorskip("onnxruntime" if form == "onnx" else form)
    if machine.gpu_count():
        pytest.skip("there is a GPU")
    artefact = write_artefact(tiny("bert"), tmp_path / "artefact", form)
    with pytest.raises(Unsupported, match=r"load with device='cpu' \(in a recipe device: cpu\)"):
        bertopt.load(artefact, device="cuda")


@pytest.mark.parametrize("device", ["gpu", "CPU", 0])
def test_the_device_is_one_of_two(device: Any, tmp_path: Path) -> None:
    """A runtime's own error read as a damaged artefact."""
    with pytest.raises(UsageError, match="device must be one of cpu, cuda, or None"):
        bertopt.load(tmp_path, device=device)


@pytest.mark.parametrize("value", [0, "8", 1.5, True])
def test_tokens_of_a_batch_are_a_count(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_batch_tokens must be a whole number from 1; got"):
        bertopt.load(tmp_path, max_batch_tokens=value)


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "deberta", "modernbert"])
@pytest.mark.parametrize("device", ["meta", "cpu:0"])
def test_a_default_device_of_the_users_program(device: str, family: str, tiny: Tiny, tmp_path: Path) -> None:
    """torch.set_default_device("cuda") is usual. An intact artefact was said to be damaged, and DeBERTa made tensors there when it ran."""
    import torch

    artefact = write_artefact(tiny(family), tmp_path / "artefact", "eager")
    texts = ["a cat", "the dog ran"]
    expected = bertopt.load(artefact).logits(texts)
    torch.set_default_device(device)
    try:
        assert (bertopt.load(artefact).logits(texts) == expected).all()
        assert torch.get_default_device() == torch.device(device)
    finally:
        torch.set_default_device(None)


def test_a_predictor_says_what_it_is(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_artefact(tiny("bert"), tmp_path / "artifact", "eager")
    predictor = bertopt.load(directory)
    assert predictor.task == "text-classification" and predictor.labels == ("bad", "good", "mixed")
    assert repr(predictor) == f"<Predictor text-classification, eager float32 on cpu, '{directory}'>"
    embedder = bertopt.load(write_artefact(tiny("bert", "feature-extraction", "mean"), tmp_path / "embedder"))
    assert embedder.labels == () and "feature-extraction, onnx float32 on cpu" in repr(embedder)
