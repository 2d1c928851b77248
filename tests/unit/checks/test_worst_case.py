"""The worst case of a comparison, with its text and tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertopt.checks import probes, worst_case
from bertopt.core import Spec
from bertopt.results import Worst
from tests.support.measured import case
from tests.support.specs import spec

TEXT, TOKEN = spec(), spec("token-classification")
WORST = Worst(metric="max_abs", value=1.0, limit=0.1, where="logits[1, 2, 0]")


def text_probes(of: Spec, texts: list[Any], ids: list[int]) -> list[probes.Probe]:
    row = np.array([ids] * len(texts))
    inputs = {"input_ids": row, "attention_mask": (row != of.pad_id).astype(np.int64), "token_type_ids": row * 0}
    return list(probes.texts(of, lambda batch: [inputs], texts))


def word(token: int) -> str:
    return f"w{token}"


def test_the_worst_text_is_shown_with_its_tokens() -> None:
    found = text_probes(TOKEN, ["one", "three"], [5, 6, 7, 8, 3, 3])
    shown = worst_case.show(WORST, case(probe="texts 0, 1", row=1, token=2), found, word)
    assert (shown.text, shown.tokens, shown.token) == ("three", ["w5", "w6", "w7", "w8"], 2)
    assert shown.where == WORST.where


def test_pairs_are_shown_whole_and_long_texts_cut() -> None:
    found = text_probes(TEXT, [("a query", "x" * 2000)], [5, 6])
    shown = worst_case.show(WORST, case(probe="texts 0", row=0), found, word)
    assert shown.text is not None and shown.token is None
    assert shown.text.startswith("a query ‖ xxx") and len(shown.text) == worst_case.LONGEST_TEXT + 1


def test_random_probes_show_ids_and_what_the_mask_hides() -> None:
    found = list(probes.grid(TOKEN, [(2, 8)], None))
    at = next(p for p in found if p.padding == "holes" and p.shape == (2, 8))
    shown = worst_case.show(WORST, case(probe=at.name, row=1, token=0), found, word)
    assert shown.text is None and shown.tokens is not None and shown.token == 0
    ids, mask = at.inputs["input_ids"][1], at.inputs["attention_mask"][1]
    last = int(np.flatnonzero(mask)[-1])
    assert shown.tokens == [str(i) if valid else f"({i})" for i, valid in zip(ids, mask, strict=True)][: last + 1]


@pytest.mark.parametrize("token", [0, 3, 100, 180, 199])
def test_long_rows_are_cut_to_a_window_around_the_worst_token(token: int) -> None:
    found = text_probes(TOKEN, ["long"], list(range(100, 300)))
    shown = worst_case.show(WORST, case(probe="texts 0", row=0, token=token), found, word)
    assert shown.tokens is not None and shown.token is not None
    assert len(shown.tokens) == worst_case.WINDOW
    assert shown.tokens[shown.token] == f"w{100 + token}"


def test_what_no_probe_holds_is_left_as_it_is() -> None:
    for at in (case(probe="8 × 16, under the clock", row=0, token=0), case(), case(probe="texts 0")):
        assert worst_case.show(WORST, at, text_probes(TOKEN, ["one"], [5]), word) == WORST
