"""Campaigns over all passes: a pass that is new is in each of them, or is left out by name."""

from __future__ import annotations

from bertopt import passes
from bertopt.checks.parity import DEFAULT_LIMITS
from campaigns import clean_runs, matrix, orders

BUILT_IN = {name for name, cls in passes.all_passes().items() if cls.__module__.startswith("bertopt.passes.")}


def test_the_matrix_has_a_column_for_every_pass_and_limits_for_every_precision() -> None:
    assert {*matrix.LINES, *matrix.LEFT_OUT} == BUILT_IN
    assert set(matrix.LIMITS) == set(DEFAULT_LIMITS)


def test_orders_hold_every_pass_that_stands_with_its_defaults() -> None:
    assert {*orders.built_in(), *orders.LEFT_OUT} == BUILT_IN


def test_clean_runs_draw_every_pass_that_runs_on_a_cpu() -> None:
    assert {step["pass"] for step, _ in clean_runs.PASSES} | set(clean_runs.LEFT_OUT) == BUILT_IN


def test_a_cell_of_the_matrix_is_built_opened_and_compared() -> None:
    (good, refused) = matrix.cells(["distilbert"], ["token-classification"], ["use_sdpa", "keep_cls_only"])
    assert good.outcome == matrix.OK and good.figures is not None and 0 < good.figures["value"] < good.figures["limit"]
    assert refused.outcome.startswith("unsupported: ") and "keep_cls_only" in refused.outcome
