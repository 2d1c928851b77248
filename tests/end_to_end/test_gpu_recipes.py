"""The passes that are written for GPUs through whole runs on the CPU: checks, delivery, `verify` and `load`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt.commands.verify import verify
from bertopt.errors import UsageError
from bertopt.modeling import fp8
from bertopt.results import Report
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny

TEXTS = ["the cat sat on the mat", "a very good film , not bad !"]
HALF = {"pass": "cast_half", "dtype": "bfloat16"}
VARLEN = {"pass": "pack_sequences", "attention": "varlen"}


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify") as shared:
        yield shared


def run(tiny: Tiny, tmp_path: Path, *steps: dict[str, Any]) -> Report:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    recipe = {
        "schema_version": 1, "model": str(tiny()), "device": "cpu", "steps": list(steps), "deliver": "last",
        "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(tmp_path / "texts.txt")},
    }  # fmt: skip
    return bertopt.run(recipe, tmp_path / "out")


def reasons(report: Report) -> list[tuple[str, str, Any]]:
    return [(row.name, row.status, row.reason) for row in report.stages]


@pytest.mark.skipif(fp8.cpu_refusal() is not None, reason=fp8.cpu_refusal() or "")
@pytest.mark.parametrize(
    "steps",
    [[{"pass": "merge_qkv"}, HALF, VARLEN, {"pass": "quantize_fp8"}], [HALF, {"pass": "quantize_fp8", "keep_bf16": ["layer.0"]}]],
    ids=["varlen", "padded"],
)
def test_fp8_is_delivered_and_opens(tiny: Tiny, tmp_path: Path, steps: list[dict[str, Any]]) -> None:
    report = run(tiny, tmp_path, *steps)
    assert report.exit_code == 0, reasons(report)
    last = report.stages[-1]
    assert last.precision == "float8" and verify(tmp_path / "out" / "artifact").exit_code == 0
    first, again = (bertopt.load(tmp_path / "out" / "artifact")(TEXTS) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_a_package_is_delivered_and_opens(tiny: Tiny, tmp_path: Path) -> None:
    report = run(tiny, tmp_path, HALF, {"pass": "package_aot"})
    assert report.exit_code == 0, reasons(report)
    artifact = tmp_path / "out" / "artifact"
    assert verify(artifact).exit_code == 0 and len(bertopt.load(artifact)(TEXTS)) == 2


def test_graphs_are_refused_where_there_is_no_gpu(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CUDA graphs need a GPU"):
        run(tiny, tmp_path, VARLEN, {"pass": "capture_graphs"})
