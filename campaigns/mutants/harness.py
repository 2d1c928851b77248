"""Plants one mutant at a time in a recipe on a tiny checkpoint, and reads from the report which gate caught it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bertopt
from bertopt.checks import parity
from bertopt.results import Failure, Report, Stage
from campaigns.mutants import checkpoints
from campaigns.mutants.plant import Checkpoint, Mutant, Step
from tests.support.tiny_models import WORDS

SHAPES = [[1, 8], [2, 16]]
TEXTS = 24
PLANTED = "mutant"
#: Of which texts for ESM consist.
AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWC"


@dataclass(frozen=True)
class Finding:
    """What became of one mutant."""

    name: str
    about: str
    expected: str
    caught_by: tuple[str, ...]
    """Every gate that objected; none where nobody did."""
    said: str
    exit_code: int
    """The run's. A mutant is caught by this alone: whatever was said, what ends with 0 is delivered."""
    seconds: float

    @property
    def good(self) -> bool:
        return self.exit_code != 0

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "good": self.good}


class Bench:
    """Tiny checkpoints and output directories under `scratch`; stages before the mutant are built once."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def plant(self, mutant: Mutant) -> Finding:
        """Run the mutant's recipe; says by which gates it was caught. Raises AssertionError where a control failed."""
        start = time.monotonic()
        if mutant.deed:
            # A deed is no run: it raises what the command line ends with.
            caught, said = mutant.fault(self)
            code = 3 if caught else 0
        else:
            report = self.run(mutant)
            (caught, said), code = judged(report), report.exit_code
        seconds = round(time.monotonic() - start, 2)
        return Finding(mutant.name, mutant.about, mutant.gate, tuple(caught), said, code, seconds)

    def run(self, mutant: Mutant) -> Report:
        planted: dict[str, Any] = {"pass": mutant.step, "name": PLANTED, "mutant": mutant.name}
        planted["limits"] = dict(mutant.limits)
        return self.recipe(mutant.on, (*mutant.line, planted, *mutant.steps), mutant.labelled)

    def recipe(self, of: Checkpoint, steps: tuple[Step, ...], labelled: bool = False, **head: Any) -> Report:
        """Run `steps` on a checkpoint; steps before the first planted one share an output directory."""
        line = [step["pass"] for step in steps if not step["pass"].startswith("plant")]
        key = "-".join(str(part) for part in (of.family, of.task, of.pooling, of.head, *line, labelled))
        model = self.checkpoint(of)
        recipe = {
            "schema_version": 1, "model": str(model), "device": "cpu", "steps": [dict(step) for step in steps],
            "inputs": {"shapes": SHAPES, "texts": str(self.texts(of, model, labelled))}, **head,
        }  # fmt: skip
        return bertopt.run(recipe, self.scratch / "out" / key)

    def checkpoint(self, of: Checkpoint) -> Path:
        path = self.scratch / f"{of.family}-{of.task}-{of.pooling}-{of.head}"
        return path if path.exists() else checkpoints.write(path, of)

    def texts(self, of: Checkpoint, model: Path, labelled: bool) -> Path:
        """Texts of every length; their labels are what the checkpoint answers, so its accuracy is 1."""
        path = model.with_suffix(".jsonl" if labelled else ".txt")
        if not path.exists():
            rng = random.Random(0)
            words = AMINO_ACIDS if of.family == "esm" else WORDS
            texts = [" ".join(rng.choices(words, k=1 + index)) for index in range(TEXTS)]
            if labelled:
                lines = [json.dumps({"text": text, "label": label}) for text, label in labels(model, texts)]
            else:
                lines = texts
            path.write_text("\n".join(lines) + "\n")
        return path


def labels(model: Path, texts: list[str]) -> list[tuple[str, str]]:
    """Each text with transformers' own label for it."""
    import transformers

    answers = transformers.pipeline("text-classification", str(model), device="cpu")(texts)
    return [(text, answer["label"]) for text, answer in zip(texts, answers, strict=True)]


def judged(report: Report) -> tuple[list[str], str]:
    """The gates that objected to the planted stage, and their words. All others must be in order."""
    row = report.stage(PLANTED)
    before = [stage for stage in report.stages if stage.index < row.index and stage.status != "ok"]
    assert not before, f"control: '{before[0].name}' is {before[0].status}: {before[0].reason}"
    if row.status == "ok" and report.exit_code == 0:
        void = [case.warning for case in row.latency or [] if case.kind == "shape" and not case.vs_reference]
        if void and len(void) == len(SHAPES):
            return ["latency"], str(void[0])
        return [], "delivered" if report.delivered else "passed every gate"
    assert report.delivered is None and report.exit_code != 0, f"{row.status}, but delivered: {report.delivered}"
    # What is planted may be caught by a step behind it.
    caught = next((stage for stage in report.stages if stage.index >= row.index and stage.status != "ok"), row)
    return gates(caught, report.exit_code), report.reason or ""


def gates(row: Stage, exit_code: int) -> list[str]:
    """Which gates a stage that is not `ok` was caught by."""
    if row.status == "noop":
        return ["noop"]
    if row.status in ("unsupported", "unverified"):
        return ["unsupported"]
    if exit_code == 6:
        return ["integrity"]
    if exit_code == 3 and not row.failures and "not part of bertopt" not in (row.reason or ""):
        return ["parity"]  # answers of another form: nothing to compare
    if row.failures:
        return list(dict.fromkeys(gate(failure, row) for failure in row.failures))
    return ["build"] if row.form is None else ["load"]


def gate(failure: Failure, row: Stage) -> str:
    if failure.gate != "parity":
        return failure.gate
    if failure.metric is None:
        return "finite"
    assert row.parity is not None
    # Only answers under the clock are wrong where the probes' alone would pass.
    probed = [case for case in row.parity.cases if "under the clock" not in case.where]
    return "timed" if parity.judge(probed, row.parity.limits, None).passed else "parity"
