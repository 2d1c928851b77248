"""`bertopt compare` of two artefacts: their answers are compared and they are timed. Reports: `tests/unit/report/test_regressions.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.commands import compare
from bertopt.errors import IntegrityError, UsageError
from bertopt.pipeline.examiner import Examiner
from bertopt.report.diff import Tolerances
from bertopt.results import Limits
from tests.support.artefacts import write_artefact
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.compare") as shared:
        yield shared


@pytest.fixture(scope="module")
def export(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`export(steps, limits=…, task=…)`: the directory of an artefact."""

    def go(*steps: str, task: str = "text-classification", limits: dict[str, Any] | None = None) -> Path:
        out = tmp_path_factory.mktemp("out")
        (out / "t.txt").write_text("the cat sat on the mat\n")
        recipe = {
            "schema_version": 1, "model": str(tiny(task=task)), "device": "cpu", "limits": {"float32": limits or {}},
            "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(out / "t.txt")}, "steps": [{"pass": step} for step in steps],
        }  # fmt: skip
        report = bertopt.run(recipe, out)
        assert report.exit_code == 0, report.reason
        return out / "artifact"

    return go


@pytest.fixture(scope="module")
def plain(export: Callable[..., Path]) -> Path:
    return export("touch")


WIDE = {"rel_l2": 9, "max_abs": 99, "cosine_min": -1, "label_flips_max": 1}
#: The race of tests proves nothing: whatever it says is no regression.
SLACK: dict[str, Any] = {"slower": 1e9}


def test_equal_artefacts(plain: Path, export: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is that of the same work, sweeps included: two copies of one MiniLM differed by two thirds without these."""
    done = []
    swept, peaks = Examiner.sweep, Examiner.with_peaks

    def sweep(self: Examiner, *arguments: Any) -> Any:
        found = swept(self, *arguments)
        done.append("sweeps")
        return found

    def with_peaks(self: Examiner, *arguments: Any) -> Any:
        done.append("peaks")
        return peaks(self, *arguments)

    monkeypatch.setattr(Examiner, "sweep", sweep)
    monkeypatch.setattr(Examiner, "with_peaks", with_peaks)
    found = compare.compare(plain, export("use_sdpa"), Tolerances(**SLACK))
    assert found.exit_code == 0, found.reason
    assert done[-2:] == ["sweeps", "peaks"]
    seen = {(change.gate, change.what) for change in found.changes}
    assert {("parity", "rel_l2"), ("latency", "end to end"), ("latency", "2 × 8"), ("size", "size_bytes")} <= seen


def test_an_artefact_that_answers_otherwise(plain: Path, export: Callable[..., Path], tmp_path: Path) -> None:
    other = export("swap_labels", limits=WIDE)
    found = compare.compare(plain, other, Tolerances(**SLACK))
    assert found.exit_code == 3 and found.reason.startswith("'swap_labels' regressed: ")
    assert "rel_l2" in {change.what for change in found.regressions()}
    assert compare.compare(plain, other, Tolerances(**SLACK, limits=Limits(**WIDE))).exit_code == 0
    answers = bertopt.load(plain)(["the cat sat on the mat", "a good film"])
    lines = [json.dumps({"text": t, "label": a["label"]}) for t, a in zip(["the cat sat on the mat", "a good film"], answers, strict=True)]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    found = compare.compare(plain, plain_copy(plain, tmp_path), Tolerances(**SLACK), tmp_path / "t.jsonl")
    assert found.exit_code == 0 and [c.after for c in found.changes if c.gate == "quality"] == [1.0]


def test_a_spoilt_word_between_artefacts_of_reduced_precision(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Their limits name no figure of parity that one word of many would miss."""
    from safetensors.torch import load_file, save_file

    checkpoint = tiny("bert")
    spoilt = Path(shutil.copytree(checkpoint, tmp_path / "spoilt"))
    state = load_file(spoilt / "model.safetensors")
    state["bert.embeddings.word_embeddings.weight"][40] *= -1
    save_file(state, spoilt / "model.safetensors", {"format": "pt"})
    first, same, other = (
        write_artefact(source, tmp_path / name, form)
        for source, name, form in ((checkpoint, "first", "native"), (checkpoint, "same", "openvino"), (spoilt, "other", "native"))
    )
    tolerances = Tolerances(**SLACK, bigger=9, memory=9)
    right = compare.compare(first, same, tolerances)
    assert right.exit_code == 0, right.reason
    found = compare.compare(first, other, tolerances)
    assert found.exit_code == 3 and [change.gate for change in found.regressions()] == ["coverage"]
    assert "one row of the coverage sweeps" in found.reason


def plain_copy(directory: Path, folder: Path) -> Path:
    return Path(shutil.copytree(directory, folder / "copy"))


def test_artefacts_that_do_not_go_together(plain: Path, export: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is another kind of model"):
        compare.compare(plain, export("touch", task="fill-mask"), Tolerances())
    with pytest.raises(UsageError, match="two artefacts or two reports; got one of each"):
        compare.compare(plain, plain.parent, Tolerances())
    with pytest.raises(UsageError, match="the same directory"):
        compare.compare(plain, plain / ".." / "artifact", Tolerances())
    damaged = plain_copy(plain, tmp_path)
    (damaged / "config.json").write_text("{}")
    with pytest.raises(IntegrityError):
        compare.compare(plain, damaged, Tolerances())


def test_output_directories_hold_reports(plain: Path) -> None:
    found = compare.compare(plain.parent, plain.parent / "report.json", Tolerances())
    assert found.exit_code == 0 and "no regression" in found.reason
