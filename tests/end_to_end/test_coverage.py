"""Models that are wrong where no probe looks, and right ones: the coverage sweeps tell them apart."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer as FastTokenizer

import bertopt
from bertopt import stages
from bertopt.checks import coverage, parity, probes, sweep_plan
from bertopt.core import ShapeLimits
from bertopt.pipeline import head_to_head
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.sweeps import Sweeps
from bertopt.report import html, terminal
from bertopt.results import Ratio, Report, Stage
from bertopt.runtime.tokenization import Tokenizer
from tests.support import uncovered_passes
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import write_tiny

assert uncovered_passes.ZeroEmbeddings.name() == "zero_embeddings"
VOCABULARY = 12_000
SHAPES = [(1, 8), (2, 16)]
NO_COVERAGE = "bertopt.checks.gates.coverage.failures"


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    with cheap_workers("pipeline"):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding model of more ids than the probes read."""
    import transformers

    out = write_tiny(tmp_path_factory.mktemp("wide"), task="feature-extraction", pooling="mean")
    network = transformers.AutoModel.from_pretrained(out)
    network.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    weight = network.get_input_embeddings().weight
    weight.data = weight.data[:83].repeat(145, 1)[:VOCABULARY].flip(1) + weight.data * 0.1
    network.save_pretrained(out)
    return out


def run(out: Path, model: Path, *steps: dict[str, Any]) -> Report:
    recipe = {"schema_version": 1, "model": str(model), "device": "cpu", "steps": list(steps), "inputs": {"shapes": SHAPES}}
    return bertopt.run(recipe, out)


@pytest.fixture(scope="module")
def sdpa(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of `use_sdpa`. Treat it as read-only."""
    out = tmp_path_factory.mktemp("sdpa")
    run(out, model, {"pass": "use_sdpa"})
    return out


@pytest.fixture
def begun(sdpa: Path, tmp_path: Path) -> Path:
    """An output directory in which that was run before."""
    return Path(shutil.copytree(sdpa, tmp_path / "begun"))


def test_texts_behind_a_prompt_are_compared(tmp_path: Path) -> None:
    """Users of such a model send few others."""
    model = write_tiny(tmp_path / "model", task="feature-extraction", pooling="mean")
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: ", "document": ""}}))
    ids = FastTokenizer.from_file(str(model / "tokenizer.json")).encode("query: ", add_special_tokens=False).ids
    report = run(tmp_path / "out", model, {"pass": "use_sdpa"}, {"pass": "spoil_beginnings", "ids": ids})
    assert report.exit_code == 3 and report.stage("use_sdpa").status == "ok"
    assert {failure.gate for failure in report.stage("spoil_beginnings").failures} >= {"parity"}


def printed(report: Report) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(terminal.render(report))
    return file.getvalue()


def unprobed(out: Path) -> list[int]:
    """The ids that no parity probe of a run with the built-in texts reads."""
    directory = next((out / "stages").glob("reference-*"))
    spec = stages.read_manifest(directory).spec
    tokenizer = Tokenizer(directory, spec)
    texts = probes.built_in_texts()
    every = [
        *probes.grid(spec, SHAPES, None), *probes.serving(spec, 32),
        *probes.texts(spec, lambda of: [tokenizer.batch(tokenizer.encode(of))], texts),
    ]  # fmt: skip
    seen = set(np.concatenate([probe.inputs["input_ids"].ravel() for probe in every]).tolist())
    return [number for number in range(spec.vocabulary) if number not in seen]


def first_unseen(out: Path) -> int:
    """The first id that neither a parity probe nor the sweeps of every stage run."""
    directory = next((out / "stages").glob("reference-*"))
    sweeps = Sweeps(stages.read_manifest(directory).spec, directory.name, "cpu").plan.of(False, ShapeLimits(longest=512), every=False)
    ran = set(np.concatenate([probe.inputs["input_ids"].ravel() for probe in sweeps]).tolist())
    return next(number for number in unprobed(out) if number not in ran)


def test_right_models_pass_and_the_report_says_what_was_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plan, "STAGE_LENGTHS_BUDGET", 0)  # as in a larger model
    steps = [{"pass": "use_sdpa"}, {"pass": "cast_half", "dtype": "bfloat16"}, {"pass": "export_onnx", "after": "use_sdpa"},
             {"pass": "quantize_int8"}]  # fmt: skip
    report = run(tmp_path, model, *steps)
    assert report.exit_code == 0, report.reason
    assert report.stages[0].coverage is None
    exact, delivered = report.stage("export_onnx").coverage, report.stage("quantize_int8").coverage
    assert exact is not None and delivered is not None and exact.seed == delivered.seed
    for row in report.stages[1:]:
        found = row.coverage
        assert found is not None and found.finite
        assert (found.positions, found.batch_sizes, found.token_types) == (1.0, 1.0, 1.0)
        assert set(found.outputs) - {coverage.IN_ONE_CALL} == {"last_hidden_state", "sentence_embedding", coverage.END_TO_END}
    assert coverage.IN_ONE_CALL in delivered.outputs and coverage.IN_ONE_CALL not in exact.outputs
    # What is delivered runs every sweep, and the ids in short rows too, since it is INT8.
    assert delivered.ids == delivered.lengths == 1.0 and delivered.tokens > VOCABULARY > exact.tokens / 8
    assert exact.ids < 1.0
    for name, output in exact.outputs.items():
        assert output.worst < 1e-5 < 1e-4 < delivered.outputs[name].median
    assert "checked: 100 % of ids, 100 % of positions, 100 % of batch sizes, " in printed(report)
    assert "Run at least once: <b>100 % of ids" in html.page(report)
    assert Report.model_validate_json(report.model_dump_json(by_alias=True)) == report


@pytest.mark.parametrize(
    "step",
    [
        {"pass": "spoil_batches", "first": 9, "last": 31},
        {"pass": "spoil_batches", "first": 17, "last": 17},
        {"pass": "spoil_batches", "first": 100, "last": 999},
        {"pass": "spoil_batches", "first": 9, "last": 999, "noise": 0.12},
        {"pass": "spoil_positions", "first": 40},
        {"pass": "spoil_hidden"},
        {"pass": "zero_embeddings"},
        {"pass": "zero_embeddings", "claims": "bfloat16"},
        {"pass": "zero_embeddings", "one": True},
        {"pass": "zero_embeddings", "one": True, "claims": "bfloat16"},
    ],
    ids=lambda step: "-".join(map(str, step.values())),
)
def test_what_no_probe_looks_at_is_refused(
    model: Path, begun: Path, step: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = dict(step)
    monkeypatch.setattr(parity, "_UNIT", math.inf)  # noise makes normalised embeddings longer than 1, which is seen first
    if step["pass"] == "zero_embeddings":
        ids = unprobed(begun)
        assert len(ids) > VOCABULARY / 3
        step["ids"] = ids[500:501] if step.pop("one", False) else ids
    report = run(begun, model, step)
    assert report.exit_code == 3 and report.delivered is None, report.stages[-1].coverage
    gates = {failure.gate for failure in report.stages[-1].failures}
    assert gates & {"coverage", "certificate"}
    alone = step["pass"] in ("spoil_batches", "spoil_hidden") or len(step.get("ids", ())) == 1
    if alone and "claims" not in step:
        # Coverage alone keeps this from being delivered; many wrong ids are met by chance, and weights cast wrongly by certificates.
        monkeypatch.setattr(NO_COVERAGE, lambda *_: [])
        assert run(begun, model, step).exit_code == 0


@pytest.mark.parametrize(("on_fail", "deliver"), [("revert", "last"), ("skip", "fastest"), ("skip", "last"), ("stop", "fastest")])
def test_a_fault_that_only_the_stage_to_deliver_shows(
    model: Path, begun: Path, on_fail: str, deliver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wrong id passes the checks of every stage, and is found before delivery: then another stage is delivered, or none."""
    monkeypatch.setattr(sweep_plan, "STAGE_LENGTHS_BUDGET", 0)  # as in a larger model
    wrong = {"pass": "zero_embeddings", "ids": [first_unseen(begun)], "on_fail": on_fail}
    first, sweep = [], Examiner.sweep
    monkeypatch.setattr(Examiner, "sweep", lambda self, name, *of: first.append(name) or sweep(self, name, *of))
    # Whichever happens to be faster, the wrong one is first in line.
    fast, mix = Ratio(ratio=9.0, low=8.0, high=10.0), Stage.mix

    def faster(row: Stage) -> Any:
        timed = mix(row)
        return timed.model_copy(update={"vs_reference": fast}) if timed and row.name == "zero_embeddings" else timed

    monkeypatch.setattr(Stage, "mix", faster)
    monkeypatch.setattr(head_to_head, "candidates", lambda rows: [])
    recipe = {"schema_version": 1, "model": str(model), "device": "cpu", "steps": [{"pass": "use_sdpa"}, wrong],
              "inputs": {"shapes": SHAPES}, "deliver": deliver}  # fmt: skip
    report = bertopt.run(recipe, begun)
    row = report.stage("zero_embeddings")
    assert first[0] == "zero_embeddings" and "coverage" in {failure.gate for failure in row.failures}
    assert row.status == {"revert": "reverted", "skip": "skipped", "stop": "failed"}[on_fail]
    if on_fail == "stop" or (on_fail, deliver) == ("skip", "last"):
        assert report.exit_code == 3 and report.delivered is None and "coverage sweeps" in (report.reason or "")
    else:
        assert report.exit_code == 0 and report.delivered is not None and report.delivered.stage in ("use_sdpa", "reference")
        assert any("'zero_embeddings' passed its own checks" in warning for warning in report.model["warnings"])


def test_an_engine_runs_the_sweeps_that_its_profiles_admit(sdpa: Path) -> None:
    from bertopt.core import Profile

    spec = stages.read_manifest(next((sdpa / "stages").glob("reference-*"))).spec
    whole = sweep_plan.plan(spec, 1, 8192)
    narrow = ShapeLimits(longest=32, profiles=(Profile(opt=(4, 16), max=(8, 32)),))
    some = whole.of(False, narrow)
    assert {probe.padding for probe in some} == {"batch sizes", sweep_plan.SHORT_ROWS}
    shares = coverage.shares(spec, some)
    assert 0 < shares["batch_sizes"] <= 8 / 32 and shares["positions"] <= 0.5 and shares["ids"] == 1.0

    def run_rows(inputs: Any) -> dict[str, Any]:
        assert narrow.fit(*inputs["input_ids"].shape) is not None
        return {"sentence_embedding": inputs["input_ids"][:, :1].astype(np.float32)}

    for probe in some:
        answers, finite = coverage.answer(run_rows, probe, spec, narrow, 1)
        assert finite and np.array_equal(answers["sentence_embedding"][:, 0], probe.inputs["input_ids"][:, 0])
