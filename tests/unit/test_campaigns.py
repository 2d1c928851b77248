"""Campaigns over all passes: a pass that is new is in each of them, or is left out by name."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from bertopt import passes
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.workers import client
from campaigns import clean_runs, matrix, orders, serve_load
from tests.support import example_passes
from tests.support.exports import FOLDER
from tests.support.shared_workers import SharedWorkers

assert example_passes.RaiseError.name() == "raise_error"
BUILT_IN = {name for name, cls in passes.all_passes().items() if cls.__module__.startswith("bertopt.passes.")}


def test_the_matrix_has_a_column_for_every_pass() -> None:
    assert {*matrix.LINES, *matrix.LEFT_OUT} == BUILT_IN


def test_orders_hold_every_pass_that_stands_with_its_defaults() -> None:
    assert {*orders.built_in(), *orders.LEFT_OUT} == BUILT_IN


def test_clean_runs_draw_every_pass_that_runs_on_a_cpu() -> None:
    assert {step["pass"] for step, _ in clean_runs.PASSES} | set(clean_runs.LEFT_OUT) == BUILT_IN


def test_a_cell_of_the_matrix_is_built_opened_and_compared() -> None:
    good, refused, half = matrix.cells(["distilbert"], ["token-classification"], ["use_sdpa", "keep_cls_only", "cast_half"])
    assert good.outcome == matrix.OK and good.figures is not None and 0 < good.figures["value"] < good.figures["limit"]
    assert refused.outcome.startswith("unsupported: ") and "keep_cls_only" in refused.outcome
    assert half.outcome == matrix.OK and half.figures is not None and 0.5 < half.figures["rounding"]["error_ratio"] < 1.3


def test_a_pass_that_ends_by_an_error_fails_its_cell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.LINES, "raise_error", ())
    bad, good = matrix.cells(["bert"], ["text-classification"], ["raise_error", "use_sdpa"])
    assert bad.outcome.startswith("FAILED: ") and "a bug in the pass" in bad.outcome
    assert good.outcome == matrix.OK


def test_a_cell_of_the_matrix_fails_where_reduced_precision_costs_more_than_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = DEFAULT_LIMITS["bfloat16"].model_copy(update={"error_ratio_max": 0.5})
    monkeypatch.setattr("bertopt.checks.parity.DEFAULT_LIMITS", {**DEFAULT_LIMITS, "bfloat16": tight})
    (half,) = matrix.cells(["distilbert"], ["token-classification"], ["cast_half"])
    assert half.outcome.startswith("FAILED: error_ratio: the mean error on real texts must be at most 0.5 times that of the simulated rounding")


class _Silent:
    """A connection whose server never answers."""

    def __init__(self, port: int) -> None:
        del port

    async def post(self, path: str, body: bytes, request_id: str = "") -> None:
        await asyncio.sleep(60)

    def close(self) -> None:
        pass


class _Known:
    def request(self, rng: random.Random) -> tuple[list[int], bytes]:
        return [0], b"{}"


@pytest.mark.parametrize(("abandon", "outcomes"), [(False, {"wrong: no answer in 0.01 s"}), (True, {"wrong: no answer in 0.01 s", "abandoned"})])
def test_a_request_that_the_server_never_answers_is_not_counted_as_abandoned(
    monkeypatch: pytest.MonkeyPatch, abandon: bool, outcomes: set[str]
) -> None:
    monkeypatch.setattr(serve_load, "Connection", _Silent)
    monkeypatch.setattr(serve_load, "ANSWER_S", 0.01)
    count: Counter[str] = Counter()
    sent = iter(range(200 if abandon else 1))
    known: Any = _Known()
    asyncio.run(serve_load._client(0, known, 0, lambda: next(sent, None) is not None, count, abandon))
    assert set(count) == outcomes


@pytest.mark.parametrize(("variables", "opened"), [({}, client.OPERATIONS), ({FOLDER: "exports"}, "tests.support.operations")])
def test_workers_of_a_campaign_share_no_exports(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], opened: str) -> None:
    """Outside of a test run, the first model that a campaign built ended it with a KeyError."""
    monkeypatch.delenv(FOLDER, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    started: list[str] = []
    monkeypatch.setattr(client.Workers, "start", lambda _, operations: started.append(operations))
    SharedWorkers.start(SharedWorkers.__new__(SharedWorkers))
    assert started == [opened]
