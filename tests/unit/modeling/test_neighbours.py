"""Families whose tokens read those beside them: a text's answer must be that of the text alone, as transformers computes it unpadded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertopt.core import Context, Eager
from bertopt.errors import CheckpointWarning, IntegrityError
from bertopt.modeling import checkpoint
from bertopt.modeling.config_checks import check_config
from bertopt.passes import ConvertOpenvino, ExportOnnx
from bertopt.sessions import open_session
from tests.support.tiny_models import CLASSES, HEADS, NEIGHBOUR_FAMILIES, write_tiny

CASES = [(family, task) for family in NEIGHBOUR_FAMILIES for task in HEADS]
#: Tokens of the rows of a batch; the last text has the model's 64 positions to itself where it is alone.
LENGTHS = (1, 2, 9, 5, 12)

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    def make(family: str, task: str = "text-classification", **extra: Any) -> Path:
        return write_tiny(tmp_path_factory.mktemp(family) / "model", family, task, extra=extra)

    return make


def plain(directory: Path, family: str, task: str) -> Any:
    """transformers' own model, in float32 with its eager attention."""
    with checkpoint.quiet():
        return getattr(transformers, CLASSES[family] + HEADS[task]).from_pretrained(directory, attn_implementation="eager").eval()


def batch(model: Eager, side: str = "right") -> dict[str, torch.Tensor]:
    """Rows of `LENGTHS` tokens, each of two segments, padded on one side."""
    width = max(LENGTHS)
    ids = torch.from_numpy(model.spec.random_ids((len(LENGTHS), width), np.random.default_rng(5)))
    columns, lengths = torch.arange(width), torch.tensor(LENGTHS)[:, None]
    mask = (columns < lengths if side == "right" else columns >= width - lengths).long()
    types = (columns % 2 == 1).long() * mask
    named = {"input_ids": torch.where(mask > 0, ids, model.spec.pad_id), "attention_mask": mask, "token_type_ids": types}
    return {name: named[name] for name in model.spec.inputs}


def outputs(model: Any, task: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers' model gives, [B, …], of question answering both kinds of logits."""
    with torch.inference_mode():
        found = model(**inputs)
    if task == "question-answering":
        return torch.stack([found.start_logits, found.end_logits], dim=-1)
    return found.last_hidden_state if task == "feature-extraction" else found.logits  # type: ignore[no-any-return]


def mine(session: Any, model: Eager, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found = session.run({name: tensor.numpy() for name, tensor in inputs.items()})
    arrays = [torch.from_numpy(np.asarray(found[name])) for name in model.spec.outputs]
    return torch.stack(arrays, dim=-1) if len(arrays) > 1 else arrays[0]


def farthest(session: Any, model: Eager, theirs: Any, task: str) -> tuple[float, float]:
    """How far the texts of a padded batch are from transformers' answers to each alone: bertopt's, and transformers' own."""
    inputs = batch(model)
    ours, padded = mine(session, model, inputs), outputs(theirs, task, inputs)
    far = [0.0, 0.0]
    for row, length in enumerate(LENGTHS):
        alone = outputs(theirs, task, {name: tensor[row : row + 1, :length] for name, tensor in inputs.items()})[0]
        for at, found in enumerate((ours[row], padded[row])):
            own = found if task == "text-classification" else found[:length]
            far[at] = max(far[at], float((own - alone).abs().max()))
    return far[0], far[1]


@pytest.mark.parametrize(("family", "task"), CASES)
def test_a_text_in_a_padded_batch_is_answered_as_transformers_answers_it_alone(made: Made, family: str, task: str) -> None:
    directory = made(family, task)
    model = checkpoint.load(directory)
    assert (model.spec.family, model.spec.task, model.spec.layers, model.spec.max_length) == (family, task, 2, 64)
    assert model.spec.positions == "column" and not model.spec.left_padding_invariant
    ours, padded = farthest(open_session(model, threads=1), model, plain(directory, family, task), task)
    assert ours < 2e-5 and padded > 1e-3


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("convbert", {"num_groups": 2, "conv_kernel_size": 9}),
        ("convbert", {"head_ratio": 1, "embedding_size": 32}),
        # Fewer heads than the ratio leave one.
        ("convbert", {"num_attention_heads": 1, "conv_kernel_size": 1}),
        ("mobilebert", {"intra_bottleneck_size": 16, "use_bottleneck_attention": True, "normalization_type": "layer_norm"}),
        ("mobilebert", {"key_query_shared_bottleneck": False, "num_feedforward_networks": 1}),
        ("mobilebert", {"use_bottleneck": False, "hidden_act": "gelu"}),
        ("mobilebert", {"trigram_input": False}),
    ],
)  # fmt: skip
def test_so_it_is_for_other_shapes_of_these_networks(made: Made, family: str, extra: dict[str, Any]) -> None:
    directory = made(family, "token-classification", **extra)
    model = checkpoint.load(directory)
    ours, _ = farthest(open_session(model, threads=1), model, plain(directory, family, "token-classification"), "token-classification")
    assert ours < 2e-5


@pytest.mark.parametrize("family", NEIGHBOUR_FAMILIES)
def test_exported_graphs_answer_a_padded_text_as_transformers_does_alone(made: Made, tmp_path: Path, family: str) -> None:
    directory = made(family, "token-classification")
    reference, theirs = checkpoint.load(directory), plain(directory, family, "token-classification")
    onnx = ExportOnnx()(reference, Context(tmp_path / "onnx")).model
    (tmp_path / "openvino").mkdir()
    openvino = ConvertOpenvino()(onnx, Context(tmp_path / "openvino")).model
    for model in (onnx, openvino):
        assert farthest(open_session(model, threads=1), reference, theirs, "token-classification")[0] < 2e-5


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
@pytest.mark.parametrize("family", NEIGHBOUR_FAMILIES)
def test_a_graph_holds_for_every_length(made: Made, family: str, task: str) -> None:
    """Slices that are a token shorter than the row would be a graph for all lengths but two."""
    network = checkpoint.load(made(family, task)).network
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    dims = tuple({0: batch, 1: sequence} for _ in network.inputs)
    graph: Any = torch.export.export(network, network.example(2, 16), dynamic_shapes={"tensors": dims}).module()
    for rows, tokens in ((1, 1), (3, 2), (2, 3), (1, 64)):
        given = network.example(rows, tokens)
        with torch.inference_mode():
            assert torch.allclose(graph(*given)[0], network(*given)[0], atol=1e-5)


@pytest.mark.parametrize("family", NEIGHBOUR_FAMILIES)
def test_ids_of_masked_tokens_change_nothing(made: Made, family: str) -> None:
    model = checkpoint.load(made(family, "token-classification"))
    ids = torch.from_numpy(model.spec.random_ids((4, 14), np.random.default_rng(1)))
    mask = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1], [0] * 5 + [1] * 9, [1] * 9 + [0] * 5, [0] * 14])
    found = []
    for filled in (ids, torch.where(mask > 0, ids, 7), torch.where(mask > 0, ids, model.spec.pad_id)):
        named = {"input_ids": filled, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        with torch.inference_mode():
            found.append(model.network(*(named[name] for name in model.spec.inputs))[0])
    assert all(torch.isfinite(answer).all() for answer in found)
    for other in found[1:]:
        assert torch.equal(found[0][mask > 0], other[mask > 0])
    # Without the mask, those tokens would count.
    shown = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "token_type_ids": torch.zeros_like(ids)}
    with torch.inference_mode():
        whole = model.network(*(shown[name] for name in model.spec.inputs))[0]
    assert not torch.allclose(whole[mask > 0], found[0][mask > 0], atol=0.01)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mobilebert", "intra_bottleneck_size": 126}, "got 126 and 4"),
        ({"model_type": "mobilebert", "key_query_shared_bottleneck": False}, "must be true"),
        ({"model_type": "convbert", "conv_kernel_size": 8}, "conv_kernel_size must be odd.* got 8"),
        ({"model_type": "convbert", "num_groups": 7, "hidden_size": 768}, "multiples of num_groups; got 7"),
        ({"model_type": "convbert", "hidden_size": 36, "num_attention_heads": 12, "head_ratio": 1}, "got 36, 12 and 1"),
        ({"model_type": "squeezebert", "embedding_size": 128}, "embedding_size must be the hidden size"),
        ({"model_type": "squeezebert", "output_groups": 5, "hidden_size": 768}, "output_groups must divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(IntegrityError, match=words):
        check_config(fields)


def test_loading_says_that_other_software_answers_otherwise(made: Made) -> None:
    with pytest.warns(CheckpointWarning, match="depend on the padding behind it"):
        checkpoint.load(made("mobilebert"))
