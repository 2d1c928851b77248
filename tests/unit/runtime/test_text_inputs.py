"""What a predictor accepts as texts: any iterable of known items, and nothing that would be read as something else."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bertopt.errors import UsageError
from bertopt.runtime.collector import Collector
from bertopt.runtime.text_inputs import as_list, check
from tests.support.specs import spec

TEXTS = ["the cat", "a dog", "film"]


class Frame:
    """A table as pandas has it: its length is its rows, and iterating it gives the names of its columns."""

    ndim = 2
    columns = ("the", "cat")

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Column:
    """One column as pandas has it: another index than 0, 1, …, values when iterated."""

    ndim = 1

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, key: int) -> str:
        return {7: "the cat", 8: "a dog", 9: "film"}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(TEXTS)


class Shorter(Column):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    "given",
    [
        TEXTS, tuple(TEXTS), deque(TEXTS), UserList(TEXTS), np.array(TEXTS), np.array(TEXTS, object), Column(),
        (text for text in TEXTS), map(str, TEXTS), dict.fromkeys(TEXTS).keys(), {0: "the cat", 1: "a dog", 2: "film"}.values(),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_iterables_of_texts_are_read_in_order(given: Any) -> None:
    texts = as_list(given)
    assert texts == TEXTS or list(texts) == TEXTS
    check(texts, paired=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Frame(), r"got Frame, a table: give one column"),
        (np.array([TEXTS]), r"got ndarray with 2 dimensions"),
        (np.array("one"), r"got ndarray with 0 dimensions"),
        ({"text": "the cat"}, r"got dict: give list\(texts\.values\(\)\)"),
        ({"b", "a"}, r"got set, which has no order: give sorted\(texts\)"),
        (frozenset(), r"got frozenset, which has no order"),
        ("the cat", "got one string: put it in a list"),
        (b"the cat", "got one bytes object: decode it and put it in a list"),
        (None, "got NoneType"),
        (3, "got int"),
        (Shorter(), r"Shorter, whose length is 5, gave 3 items: give a list"),
    ],
)
def test_what_is_no_list_of_texts_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        as_list(given)


@pytest.mark.parametrize("bad", [None, b"bytes", 3, ("one",), ("a", 2), ("a", "b", "c"), ["a", "b"]])
def test_an_item_that_is_no_text_is_named(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"texts\[12\] must be a string, or a tuple of two strings for a pair; got"):
        check(["fine", ("question", "context"), bad], paired=False, first=10)


def test_a_lone_surrogate_is_named_with_its_place() -> None:
    check(["é 狗 😀"], paired=False)
    for text in ("ab\ud800c", ("fine", "ab\udfffc")):
        with pytest.raises(UsageError, match=r"texts\[1\] has a lone surrogate \(U\+D.00|U\+DFFF\) at character 2"):
            check(["fine", text], paired=False)


def test_pairs_are_asked_for_where_the_task_needs_them() -> None:
    check([("what?", "the cat")], paired=True)
    with pytest.raises(UsageError, match=r"texts\[0\] must be a pair \(question, context\)"):
        check(["the cat"], paired=True)


def test_a_collector_never_gives_rows_that_were_not_put() -> None:
    from bertopt.modeling import packing

    of = spec("feature-extraction", pooling="mean")
    lengths = np.array([2, 3])
    flat = packing.flat(of, np.arange(5), None, lengths)
    (batch,) = packing.batches(of, flat, packing.singly(lengths), [(0, 2)])
    collector = Collector(of, 3)
    collector.put(0, batch, {"sentence_embedding": np.ones((2, 4), np.float32)})
    with pytest.raises(AssertionError, match="2 of 3"):
        _ = collector.array
