"""Compiled networks are given a sequence of one token with one padding token, and answer as without it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.core import Compiled
from bertopt.modeling import checkpoint
from bertopt.sessions.torch import TorchSession
from tests.support.tiny_models import Tiny

TASKS = ["feature-extraction", "text-classification", "token-classification", "question-answering", "fill-mask"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_sequence_of_one_token(tiny: Tiny, task: str, batch: int) -> None:
    eager = checkpoint.load(tiny(task=task))
    widths: list[int] = []
    eager.network.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    fields: dict[str, Any] = {field.name: getattr(eager, field.name) for field in dataclasses.fields(Compiled)}
    compiled = TorchSession(Compiled(**fields), "cpu")
    ids = np.arange(5, 5 + batch, dtype=np.int64)[:, None]
    inputs = {name: np.zeros_like(ids) for name in eager.spec.inputs}
    inputs |= {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    expected, answers = TorchSession(eager, "cpu").run(inputs), compiled.run(inputs)

    assert widths == [1, 2]
    assert {name: value.shape for name, value in answers.items()} == {name: value.shape for name, value in expected.items()}
    for name, value in expected.items():
        np.testing.assert_allclose(answers[name], value, rtol=1e-5, atol=1e-6)
    longer = {name: np.repeat(array, 2, axis=1) for name, array in inputs.items()}
    compiled.run(longer)
    assert widths[-1] == 2 and torch.is_inference(compiled._outputs[0])


def test_the_caller_s_autocast_does_not_round_the_answers(tiny: Tiny) -> None:
    """Programs put torch.autocast around all they do; the network was checked without."""
    eager = checkpoint.load(tiny())
    ids = np.arange(5, 13, dtype=np.int64)[None]
    inputs = {name: np.zeros_like(ids) for name in eager.spec.inputs} | {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    session = TorchSession(eager, "cpu")
    expected = session.run(inputs)
    with torch.autocast("cpu", dtype=torch.float16):
        answers = session.run(inputs)
        assert torch.get_autocast_dtype("cpu") == torch.float16 and torch.is_autocast_enabled("cpu")
    for name, value in expected.items():
        np.testing.assert_array_equal(answers[name], value)
