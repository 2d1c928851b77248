"""The first DeBERTa: graphs of it hold for every length, and checkpoints in the form in which Microsoft published them open."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bertopt.core import Context, Pass
from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported
from bertopt.modeling import checkpoint, rounding, source
from bertopt.passes import ConvertOpenvino, ExportOnnx, QuantizeInt8
from bertopt.sessions import open_session
from bertopt.system.openvino_import import runs_bfloat16
from tests.support.forms import with_config
from tests.support.tiny_models import write_tiny

LENGTHS = ((1, 1), (1, 2), (3, 16), (2, 33), (2, 64))


@pytest.mark.parametrize(
    "extra",
    [
        {}, {"max_relative_positions": 10}, {"max_relative_positions": 100, "pos_att_type": "c2p|p2c|p2p"}, {"pos_att_type": ["p2c"]},
        {"talking_head": True, "position_biased_input": True, "type_vocab_size": 2, "pos_att_type": "c2p"},
    ],
    ids=str,
)  # fmt: skip
def test_a_graph_holds_for_every_length(extra: dict[str, Any], tmp_path: Path) -> None:
    """transformers' own code holds where no text is longer than the table alone, and projects the table in every call."""
    network = checkpoint.load(write_tiny(tmp_path / "model", "deberta", "token-classification", extra=extra)).network
    example = network.example(2, 16)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    program = torch.export.export(network, example, dynamic_shapes={"tensors": tuple({0: batch, 1: sequence} for _ in example)})
    graph = program.module()
    for rows, tokens in LENGTHS:
        inputs = network.example(rows, tokens)
        with torch.inference_mode():
            expected, got = network(*inputs)[0], graph(*inputs)[0]
        assert torch.allclose(got, expected, atol=1e-6 * float(expected.abs().max())), (rows, tokens)


@pytest.mark.parametrize("into", [QuantizeInt8(), ConvertOpenvino(precision="bf16")], ids=["int8", "openvino_bf16"])
def test_fewer_distances_than_positions_run_in_reduced_precision(into: Pass[Any, Any], tmp_path: Path) -> None:
    """A constant table of distances was quantised as weights, which ONNX Runtime refused to run, and OpenVINO multiplied by it in float32."""
    if isinstance(into, ConvertOpenvino) and not runs_bfloat16():
        pytest.skip("OpenVINO has no bfloat16 here")
    model = checkpoint.load(write_tiny(tmp_path / "model", "deberta", "token-classification", extra={"max_relative_positions": 10}))
    made: Any = model
    for number, step in enumerate((ExportOnnx(), into)):
        (folder := tmp_path / str(number)).mkdir()
        made = step(made, Context(folder)).model
    session = open_session(made, "cpu", threads=1)
    assert all(wanted == found for wanted, found in into.effects(made, session.facts()).values())
    for rows, tokens in LENGTHS:
        inputs = model.network.example(rows, tokens)
        with torch.inference_mode():
            expected = model.network(*inputs)[0].numpy()
        got = session.run(dict(zip(model.spec.inputs, (each.numpy() for each in inputs), strict=True)))["logits"]
        assert np.linalg.norm(got - expected) < 0.05 * np.linalg.norm(expected), (rows, tokens)


def test_run_eagerly_it_is_transformers_own_code(tmp_path: Path) -> None:
    import transformers

    folder = write_tiny(tmp_path / "model", "deberta", extra={"max_relative_positions": 10})
    model = checkpoint.load(folder)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for rows, tokens in LENGTHS:
        inputs = dict(zip(model.spec.inputs, model.network.example(rows, tokens), strict=True))
        with torch.inference_mode():
            assert torch.equal(model.network(*inputs.values())[0], plain(**inputs).logits)


def test_a_distance_is_the_same_beside_left_padding(tmp_path: Path) -> None:
    model = checkpoint.load(write_tiny(tmp_path / "model", "deberta", "feature-extraction", "mean", extra={"max_relative_positions": 10}))
    assert model.spec.left_padding_invariant and model.spec.positions == "none"
    ids, mask = torch.arange(6, 26)[None], torch.ones(1, 20, dtype=torch.int64)
    padding = torch.zeros(1, 7, dtype=torch.int64)
    with torch.inference_mode():
        alone, padded = model.network(ids, mask)[0], model.network(torch.cat([padding, ids], 1), torch.cat([padding, mask], 1))[0]
    assert torch.allclose(alone, padded, atol=1e-6)
    other = checkpoint.load(write_tiny(tmp_path / "other", "deberta", "feature-extraction", "mean", extra={"position_biased_input": True}))
    assert not other.spec.left_padding_invariant and other.spec.positions == "column"


def published(folder: Path, task: str = "fill-mask") -> Path:
    """Write a checkpoint as microsoft/deberta-base: no architectures, its own head, buffers, and positions that the configuration does not use."""
    write_tiny(folder, "deberta", task, extra={"legacy": False} if task == "fill-mask" else {})
    path = folder / "model.safetensors"
    tensors = load_file(path) | {"deberta.embeddings.position_embeddings.weight": torch.randn(64, 32), "deberta.embeddings.position_ids": torch.arange(64)[None]}
    save_file(tensors, path, {"format": "pt"})
    return with_config(folder, architectures=..., legacy=..., id2label=..., label2id=..., dtype=..., max_relative_positions=-1, pos_att_type="c2p|p2c", padding_idx=0)


def test_a_checkpoint_as_it_was_published_opens(tmp_path: Path) -> None:
    folder = published(tmp_path / "model")
    assert checkpoint.load(folder, "feature-extraction").spec.outputs == ("last_hidden_state",)
    with pytest.raises(IntegrityError, match=r'lm_predictions, and config\.json asks for another: it must have "legacy": false'):
        checkpoint.load(folder, "fill-mask")
    assert checkpoint.load(with_config(folder, legacy=False), "fill-mask").spec.over_vocabulary


def test_a_classifier_as_it_was_published_opens(tmp_path: Path) -> None:
    folder = with_config(published(tmp_path / "model", "text-classification"), architectures=["DebertaForSequenceClassification"], id2label={"0": "a", "1": "b", "2": "c"})
    assert checkpoint.load(folder).spec.labels == ("a", "b", "c")


@pytest.mark.parametrize(("field", "value"), [("share_att_key", True), ("position_buckets", 8), ("norm_rel_ebd", "layer_norm"), ("conv_kernel_size", 3)])
def test_fields_of_the_second_version_that_transformers_ignores_are_refused(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=f"{field} must be .*, as transformers' deberta computes"):
        checkpoint.load(with_config(write_tiny(tmp_path / "model", "deberta"), **{field: value}))


@pytest.mark.parametrize(("most", "words"), [(2.5, "max_relative_positions must be a whole number"), (9_000_000, r"describes about 576,\d+,\d+ parameters")])
def test_a_table_of_distances_without_bounds_is_refused(most: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=words):
        source.examine(with_config(write_tiny(tmp_path / "model", "deberta"), max_relative_positions=most))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_simulation_of_half_precision_squares_residuals_in_float32_too(precision: Any, tmp_path: Path) -> None:
    """Beside a twin whose squares are infinite in float16 every stage is near enough."""
    networks: list[Any] = [checkpoint.load(write_tiny(tmp_path / str(number), "deberta")).network for number in range(3)]
    for each in networks:
        each.base.embeddings.word_embeddings.weight.data.mul_(3000)
    reference, cast, simulated = networks
    cast.encoder.to(getattr(torch, precision))
    rounding.simulate(simulated, precision)
    inputs = reference.example(4, 12)
    with torch.inference_mode():
        expected, got, own = (network(*inputs)[0] for network in (reference, simulated, cast))
    assert float(reference.base.embeddings.word_embeddings(inputs[0]).std()) > 300
    assert 0.4 < float((got - expected).norm() / (own - expected).norm()) < 2.5


def test_a_graph_has_norms_that_half_precision_leaves_in_range(tmp_path: Path) -> None:
    """transformers' spelled out norm squares in float32, which an exported graph no longer says: cast, 300² is beyond float16."""
    network: Any = checkpoint.load(write_tiny(tmp_path / "model", "deberta", "feature-extraction")).network
    program = torch.export.export(network, network.example(2, 16))
    kinds = [str(node.target) for node in program.graph.nodes]
    assert sum("layer_norm" in kind for kind in kinds) == 1 + 2 * network.spec.layers and not any("aten.pow" in kind for kind in kinds)


def test_pairs_with_two_separators_are_warned_of(tmp_path: Path) -> None:
    """Of transformers' own class from version 5 on; the answers would differ from those that MNLI models were published with."""
    import transformers

    folder = write_tiny(tmp_path / "model", "deberta")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        checkpoint.load(folder)
    words = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "a", "b"])}
    tokenizer = transformers.DebertaTokenizer(vocab=words, merges=[])
    if tokenizer("a", "b")["input_ids"] != [1, 5, 2, 2, 6, 2]:
        pytest.skip("this transformers puts one separator there")
    tokenizer.save_pretrained(folder)
    with pytest.warns(CheckpointWarning, match=r"DebertaTokenizer puts two \[SEP\] between the texts of a pair"):
        checkpoint.load(folder)
