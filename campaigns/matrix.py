"""Families × tasks × passes: does every pass either work or say why it cannot?

    python -m campaigns.matrix [--families bert,mpnet] [--passes use_sdpa,…] [--json benchmarks/results/matrix.json]

Each pass in its natural line, on tiny random checkpoints, its stage written and opened again as a run does it, held
to parity over every shape, padding pattern, text and pair of texts, and in reduced precision to its twin, with the
default limits of a run. Exits 1 where a cell FAILED. On one thread, without timing.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bertopt import passes, stages
from bertopt.checks import framing, gates, parity, probes
from bertopt.checks.parity import ProbeOutputs
from bertopt.checks.probes import REAL, Probe
from bertopt.core import Pass, Spec
from bertopt.errors import Unsupported
from bertopt.pipeline.twins import Twins
from bertopt.results import Comparison, Limits
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.system import environment
from bertopt.workers.client import Workers
from bertopt.workers.operations import Ops
from tests.support.tiny_models import CLASSES, HEADS, TASKS, write_tiny

#: The steps before each pass: what its line looks like in a recipe. One that a family cannot take is left out.
LINES: dict[str, tuple[str, ...]] = {
    "use_sdpa": (),
    "use_better_transformer": (),
    "keep_cls_only": ("use_sdpa",),
    "merge_qkv": ("use_sdpa", "keep_cls_only"),
    "pack_sequences": ("use_sdpa", "keep_cls_only", "merge_qkv"),
    "cast_half": ("use_sdpa",),
    "quantize_fp8": ("use_sdpa", "cast_half"),
    "compile_torch": ("use_sdpa",),
    "package_aot": ("use_sdpa",),
    "build_native": (),
    "export_onnx": ("use_sdpa",),
    "fuse_ort": ("use_sdpa", "export_onnx"),
    "cast_onnx_half": ("use_sdpa", "export_onnx", "fuse_ort"),
    "quantize_int8": ("use_sdpa", "export_onnx", "fuse_ort"),
    "convert_openvino": ("use_sdpa", "export_onnx"),
    "build_tensorrt": ("use_sdpa", "export_onnx", "cast_onnx_half"),
}
#: Passes without a column: one needs a GPU.
LEFT_OUT = ("capture_graphs",)
#: Options without which a pass says nothing here.
OPTIONS: dict[str, dict[str, Any]] = {
    "build_tensorrt": {
        "library": "tensorrt_rtx", "targets": ["sm86"],
        "profiles": [{"min": [1, 1], "opt": [2, 16], "max": [8, 64]}],
    }
}  # fmt: skip
#: What the tiny model of a family must be for a pass to say something: TensorRT-RTX has no attention kernel for heads of 8.
FIELDS: dict[str, dict[str, Any]] = {"ultrabert": {"hidden_size": 64}}
#: Models that answer once a text, and how they pool; everything else of them is feature extraction.
POOLED = {"embedding": "mean", "sparse embedding": "splade"}
SHAPES = ((2, 8), (3, 16))
#: Few texts, short, long, empty, of several scripts: a tiny tokenizer spells all of them.
TEXTS = 24
OK, BUILT = "ok", "built (needs GPU)"


@dataclass(frozen=True)
class Cell:
    """What became of one pass on one model. `figures` are of the parity check, where it ran."""

    family: str
    task: str
    pass_: str
    line: tuple[str, ...]
    outcome: str
    figures: dict[str, Any] | None
    seconds: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.family, self.task, self.pass_


def cells(families: Sequence[str], tasks: Sequence[str], wanted: Sequence[str]) -> Iterator[Cell]:
    """Every cell, one model after the other. Stages that several lines share are built once."""
    with Workers() as workers:
        for family in families:
            for task in tasks:
                if not hasattr(transformers, CLASSES[family] + HEADS.get(task, "Model")):
                    continue
                with tempfile.TemporaryDirectory(prefix="bertopt-matrix-") as scratch:
                    model = _Model(Path(scratch), family, task, workers)
                    for name in wanted:
                        yield model.cell(name)


class _Model:
    """One checkpoint, the stages made of it, and the reference's answers."""

    def __init__(self, root: Path, family: str, task: str, workers: Workers) -> None:
        self.root, self.family, self.task = root, family, task
        pooling = POOLED.get(task)
        checkpoint = write_tiny(root / "checkpoint", family, "feature-extraction" if pooling else task, pooling, extra=FIELDS.get(family, {}))
        start = root / "stage-0"
        start.mkdir()
        fields = {"key": "matrix", "name": "reference", "device": "cpu"}
        Ops().op_load_checkpoint({}, str(checkpoint), "auto", str(start), fields)
        manifest = stages.read_manifest(start)
        self.spec = manifest.spec
        self.stages: dict[tuple[str, ...], Path | Unsupported] = {(): start}
        self.manifests: dict[Path, Any] = {start: manifest}
        tokenizer = Tokenizer(start, self.spec, self.spec.max_length)

        def encode(batch: Sequence[Any]) -> list[dict[str, Any]]:
            return [tokenizer.batch(tokenizer.encode(batch))]

        self.probes = _probes(self.spec, encode)
        self.reference = _answers(start, self.spec, self.probes)[0]
        (empty,) = encode([""])
        frame = framing.of_empty_text(empty["input_ids"][0])
        self.twins = Twins(workers, start, "cpu", self.spec, encode, self.probes, lambda _: None, frame)

    def cell(self, name: str) -> Cell:
        started = time.monotonic()
        line: tuple[str, ...] = ()
        for step in LINES[name]:
            if not isinstance(self.build((*line, step)), Unsupported):
                line = (*line, step)
        outcome, figures = OK, None
        try:
            outcome, figures = self.check((*line, name))
        except Exception as error:
            # Whatever goes wrong is the cell's result: one bad cell must not hide the others.
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = f"FAILED: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        return Cell(self.family, self.task, name, line, outcome, figures, time.monotonic() - started)

    def build(self, line: tuple[str, ...]) -> Path | Unsupported:
        """The stage at the end of a line whose parents exist, or why there is none."""
        if line not in self.stages:
            parent = self.stages[line[:-1]]
            assert isinstance(parent, Path)
            part = Path(tempfile.mkdtemp(prefix="stage-", dir=self.root))
            record = _pass(line[-1]).record().model_dump()
            context = {"device": "cpu", "shapes": SHAPES, "texts": [], "seed": 0}
            fields = {"key": "matrix", "name": line[-1], "device": "cpu"}
            try:
                Ops().op_build({}, str(parent), record, str(part), context, fields)
                self.manifests[part] = stages.read_manifest(part)
                self.stages[line] = part
            except Unsupported as error:
                self.stages[line] = error
        return self.stages[line]

    def check(self, line: tuple[str, ...]) -> tuple[str, dict[str, Any] | None]:
        built = self.build(line)
        if isinstance(built, Unsupported):
            return f"unsupported: {built}", None
        manifest = self.manifests[built]
        if not any(manifest.changes.values()):
            return f"FAILED: the pass changed nothing ({manifest.changes})", None
        if manifest.form == "engine":
            return BUILT, None
        packed = manifest.spec.layout == "packed"
        asked = [probe for probe in self.probes if not packed or probes.packable(self.spec, probe)]
        answers, missed = _answers(built, self.spec, asked)
        if missed:
            return f"FAILED: the stage must show {missed}", None
        # As a run does: one logit of a lone token may be near zero.
        usual = parity.scales(self.reference.values(), self.spec)
        cases = [parity.compare(probe, self.spec, answers[probe.name], self.reference[probe.name], usual) for probe in asked]
        limits = gates.effective_limits(manifest.precision, LIMITS.get(manifest.precision, Limits()), sparse=self.spec.sparse)
        found = parity.judge(cases, limits, None)
        figures = {"metric": found.worst.metric, "value": found.worst.value, "limit": found.worst.limit,
                   **Comparison.over(cases).model_dump()}  # fmt: skip
        failures = [] if found.passed else [f"{failure.text} at {found.worst.where}" for failure in parity.failures(cases, limits)]
        if manifest.precision != "float32":
            real = [probe.name for probe in asked if probe.padding in REAL]
            rounding = self.twins.compare(line[-1], real, manifest, answers, self.reference, None)
            assert rounding is not None
            figures["rounding"] = rounding.model_dump(exclude_none=True)
            failures += [failure.text for failure in gates.rounding_failures(rounding, limits)]
        return (f"FAILED: {'; '.join(failures)}" if failures else OK), figures


#: Under the defaults. A tiny ModernBERT with three labels has a cosine of 0.94 in fp8, as has its reference with simulated fp8 products.
LIMITS = {"float8": Limits(cosine_median_min=0.9)}


def _pass(name: str) -> Pass[Any, Any]:
    found: Pass[Any, Any] = passes.require(name).model_validate(OPTIONS.get(name, {}))
    return found


def _probes(spec: Spec, encode: Callable[[Sequence[Any]], list[dict[str, Any]]]) -> list[Probe]:
    texts = probes.built_in_texts()
    sample = texts[:: len(texts) // TEXTS]
    both = probes.pairs(spec, sample)
    return [
        *probes.grid(spec, SHAPES, None), *probes.texts(spec, encode, sample),
        *(probes.texts(spec, encode, both, "pair") if both else []),
    ]  # fmt: skip


def _answers(directory: Path, spec: Spec, wanted: Sequence[Probe]) -> tuple[dict[str, ProbeOutputs], str]:
    """The answers of a stage opened as a run opens it, and what its last pass must show but does not."""
    manifest = stages.verify(directory)
    model = stages.open_stage(directory, manifest)
    session = open_session(model, threads=1)
    answers = {probe.name: parity.answer(session, probe, spec) for probe in wanted}
    if not manifest.passes:
        return answers, ""
    facts = session.facts().model_copy(update={"passes": tuple(record.name for record in manifest.passes)})
    shown = _pass(manifest.passes[-1].name).effects(model, facts)
    missed = [f"{expected} {what}, found {found}" for what, (expected, found) in shown.items() if expected != found]
    return answers, "; ".join(missed)


def _words(figures: dict[str, Any]) -> str:
    if "rounding" in figures:
        return f" (error_ratio {figures['rounding']['error_ratio']:.3g})"
    return f" ({figures['metric']} {figures['value']:.3g})"


def document(found: Sequence[Cell], kept: Path) -> dict[str, Any]:
    """What is kept of a run, with what it ran on: its cells, and those of the file `kept` that were measured on the
    same hardware and versions and that this run did not repeat."""
    old = json.loads(kept.read_text("utf-8")) if kept.is_file() else {}
    now = {cell.key: asdict(cell) for cell in found}
    if old.get("environment") == environment.describe():
        now = {(cell["family"], cell["task"], cell["pass_"]): cell for cell in old["cells"]} | now
    order = [(f, t, p) for f in CLASSES for t in (*TASKS, *POOLED) for p in LINES]
    return {
        "environment": environment.describe(),
        "limits": {
            precision: LIMITS.get(precision, Limits()).over(limits).model_dump(exclude_none=True)
            for precision, limits in parity.DEFAULT_LIMITS.items()
        },
        "cells": [now[key] for key in order if key in now],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m campaigns.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--families", default=",".join(CLASSES))
    parser.add_argument("--tasks", default=",".join([*TASKS, *POOLED]))
    parser.add_argument("--passes", default=",".join(LINES))
    parser.add_argument("--json", type=Path, help="file to keep the cells in, beside those it has already")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    started = time.monotonic()
    found: list[Cell] = []
    for cell in cells(given.families.split(","), given.tasks.split(","), given.passes.split(",")):
        figures = _words(cell.figures) if cell.figures else ""
        print(
            f"{cell.family} · {cell.task} · {' + '.join((*cell.line, cell.pass_))}: {cell.outcome}{figures}", flush=True
        )
        found.append(cell)
        if given.json:
            text = json.dumps(document(found, given.json), indent=1, ensure_ascii=False)
            given.json.write_text(text + "\n", "utf-8")
    failed = sum(cell.outcome.startswith("FAILED") for cell in found)
    print(f"{len(found)} cells, {failed} failed, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
