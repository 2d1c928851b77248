"""What a run finds beyond parity, end to end: invariance, rank agreement, paired intervals, evidence, and from records."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt import pipeline
from bertopt.checks import parity
from bertopt.commands.verify import verify
from bertopt.pipeline.measurement_cache import Records
from bertopt.recipe.parser import from_dict
from bertopt.results import Report
from bertopt.workers.client import CALL_S, Worker
from tests.support import example_passes
from tests.support.measured import measured
from tests.support.shared_workers import cheap_workers
from tests.support.tiny_models import LETTERS, WORDS, Tiny

assert example_passes.SwapLabels.name() == "swap_labels"
LADDER = [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "quantize_int8", "name": "int8"}]
ANY = {"rel_l2": 9.0, "max_abs": 99.0, "cosine_min": -1.0, "cosine_mean": -1.0, "label_flips_max": 1.0}
#: What a record may hold that is none.
DAMAGES = (b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"cases": []}', b'{"sha256": "x", "measurements": "{}"}', b"[" * 100_000)
TEXTS = [f"{WORDS[i]} {WORDS[-i]} , {LETTERS[i % 26]} {WORDS[(3 * i) % 28]} !" for i in range(24)]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    with cheap_workers("pipeline", "commands.verify"):
        yield


def run(out: Path, model: Path, steps: list[Any], texts: Path | None = None, **limits: Any) -> Report:
    return bertopt.run(
        {
            "schema_version": 1, "model": str(model), "device": "cpu", "limits": limits, "steps": steps,
            "inputs": {"shapes": [[1, 8], [2, 8]], "texts": str(texts) if texts else None},
        },
        out,
    )  # fmt: skip


def labelled(path: Path, labels: list[str]) -> Path:
    lines = [json.dumps({"text": text, "label": label}) for text, label in zip(TEXTS, labels, strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_an_embedding_model_is_ranked_at_every_stage(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "t.txt"
    texts.write_text("\n".join(TEXTS) + "\n")
    model = tiny("bert", "feature-extraction", "mean")
    report = run(tmp_path / "out", model, LADDER, texts, int8={"spearman_min": 0.9, "top_k_overlap_min": 0.5})
    assert report.exit_code == 0, report.reason
    assert report.stages[0].ranking is None
    for row in report.stages[1:]:
        # The recipe's texts, and the five that stand for the built-in ones.
        assert row.ranking is not None and (row.ranking.n, row.ranking.k) == (29, 5)
    exact, rough = report.stage("export_onnx").ranking, report.stage("int8").ranking
    assert exact is not None and rough is not None
    assert exact.spearman > 0.99999 and exact.top_k_overlap == 1.0
    assert 0.9 <= rough.spearman < exact.spearman
    report = run(tmp_path / "out", model, LADDER, texts, int8={"spearman_min": 1.0})
    assert report.exit_code == 3
    assert "spearman must be at least 1; got 0.9" in str(report.reason)
    assert all(row.reused for row in report.stages)


def test_the_reference_runs_the_probes_before_the_first_step(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes is the first estimate of a step: of a large model, most of a step's time is that of the probes."""
    phase, ran, answer = "", Counter[str](), parity.answer

    def on_report(report: Report, doing: str | None, left_s: float | None) -> None:
        nonlocal phase
        phase = doing or ""

    def counted(*arguments: Any) -> Any:
        ran[phase] += 1
        return answer(*arguments)

    monkeypatch.setattr(parity, "answer", counted)
    recipe = from_dict({
        "schema_version": 1, "model": str(tiny("bert")), "device": "cpu", "timing": {"quick": True}, "steps": LADDER[:1], "inputs": {"shapes": [[1, 8]]},
    })  # fmt: skip
    assert pipeline.run(recipe, tmp_path / "out", on_report=on_report).exit_code == 0
    assert 0 < ran["reference: parity"] == ran["use_sdpa: parity"]


def test_dynamic_int8_depends_on_its_company_and_can_be_limited(tiny: Tiny, tmp_path: Path) -> None:
    report = run(tmp_path / "out", tiny("bert", "token-classification"), LADDER, int8=ANY)
    assert report.exit_code == 0, report.reason
    found = {row.name: row.invariance for row in report.stages}
    steady, shaky = found["export_onnx"], found["int8"]
    assert steady is not None and shaky is not None
    assert steady.max_abs < 1e-5 and steady.texts > 2
    assert shaky.max_abs > 1e-3
    report = run(tmp_path / "out", tiny("bert", "token-classification"), LADDER, int8={**ANY, "invariance_max": 1e-3})
    assert report.exit_code == 3
    assert "a text's output may change by at most 0.001 when batched with other texts" in str(report.reason)


def test_accuracy_has_intervals_paired_with_the_reference_s_own_answers(tiny: Tiny, tmp_path: Path) -> None:
    out, model = tmp_path / "out", tiny("bert", seed=124)  # answers two labels, the first and the second
    swap = {"pass": "swap_labels", "limits": ANY}
    first = labelled(tmp_path / "t.jsonl", ["good"] * 24)
    assert run(out, model, [{"pass": "touch"}], first).exit_code == 0
    best = [entry["label"] for entry in bertopt.load(out / "artifact")(TEXTS)]
    # Right in three of four; swapping its two labels makes that one of four.
    other = {"good": "bad", "bad": "good"}
    texts = labelled(tmp_path / "t.jsonl", [label if i % 4 else other[label] for i, label in enumerate(best)])
    row = run(out, model, [swap], texts).stage("swap_labels").quality
    assert row is not None and None not in (row.low, row.high, row.change_low, row.change_high)
    assert (row.reference, row.value, row.change, row.n) == (0.75, 0.25, -0.5, 24)
    assert row.low is not None and row.high is not None and 0 < row.low < 0.25 < row.high < 0.75
    assert row.change_low is not None and row.change_high is not None and row.change_low < -0.5 < row.change_high < 0
    # From the record of the reference: it is not asked again, and the interval is the same kind.
    again = run(out, model, [{"pass": "touch"}, swap], texts)
    touched = again.stage("touch").quality
    assert again.stages[0].reused and again.stage("swap_labels").quality == row
    assert touched is not None and (touched.reference, touched.value, touched.change) == (0.75, 0.75, 0.0)
    assert touched.change_low is not None and touched.change_high is not None and touched.change_low < 0 < touched.change_high
    assert again.stages[0].quality is not None and again.stages[0].quality.change_low is None


def test_pairs_are_probed_and_the_worst_row_is_shown(tiny: Tiny, tmp_path: Path) -> None:
    report = run(tmp_path / "out", tiny("bert"), [{"pass": "swap_labels"}])
    parity = report.stage("swap_labels").parity
    assert report.exit_code == 3 and parity is not None
    assert {"pair", "text", "left", "holes"} <= {case.padding for case in parity.cases}
    assert parity.worst.tokens and len(parity.worst.tokens) <= 64
    assert (parity.worst.text is None) == all(token.strip("()").isdigit() for token in parity.worst.tokens)


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_left_padding_is_part_of_invariance_where_it_must_not_matter(tiny: Tiny, tmp_path: Path, family: str) -> None:
    report = run(tmp_path / "out", tiny(family, "token-classification"), [{"pass": "use_sdpa"}])
    assert report.exit_code == 0, report.reason
    found = report.stage("use_sdpa").invariance
    assert found is not None and found.max_abs < 1e-4


def test_records_are_trusted_only_as_they_were_written(tiny: Tiny, tmp_path: Path) -> None:
    """Figures that somebody edits do not turn a failure into a delivery, and a damaged record ends no run."""
    out, limits = tmp_path / "out", {"float32": {"max_abs": 1e-12}}
    steps = [{"pass": "use_sdpa"}]
    assert run(out, tiny("bert"), steps, **limits).exit_code == 3
    records = sorted((out / "checks").iterdir())
    assert len(records) == 2
    for path in records:
        text = path.read_text()
        edited = re.sub(r'(max_abs\\":)[0-9.e-]+', r"\g<1>0.0", text)
        path.write_text(edited)
    assert run(out, tiny("bert"), steps, **limits).exit_code == 3
    for damages in zip(DAMAGES[::2], DAMAGES[1::2], strict=True):
        for path, damage in zip(records, damages, strict=True):
            path.write_bytes(damage)
        assert run(out, tiny("bert"), steps, **limits).exit_code == 3
    assert sorted((out / "checks").iterdir()) == records


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: repr(damage[:20]))
def test_a_damaged_record_is_none(damage: bytes, tmp_path: Path) -> None:
    records = Records(tmp_path / "checks", ["x"])
    records.write(["a", None], measured(changed=None))
    (path,) = (tmp_path / "checks").iterdir()
    path.write_bytes(damage)
    assert records.read(["a", None]) is None


def test_a_record_with_any_bit_flipped_is_none(tmp_path: Path) -> None:
    records = Records(tmp_path / "checks", ["x"])
    records.write(["a", None], measured(changed=None))
    (path,) = (tmp_path / "checks").iterdir()
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        assert records.read(["a", None]) is None, place
    path.write_bytes(whole)
    assert records.read(["a", None]) is not None


def test_threads_and_the_sources_that_measure_are_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Records(tmp_path / "checks", ["x"]).write(["a", None], measured(changed=None))
    assert Records(tmp_path / "checks", ["x"]).read(["a", None]) is not None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Records(tmp_path / "checks", ["x"]).read(["a", None]) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("bertopt.stages.source_hash.of_package", lambda *_: "edited")
    assert Records(tmp_path / "checks", ["x"]).read(["a", None]) is None


def test_the_reference_has_a_time_limit_too(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a step is that of every call while it is measured, and of no other."""
    exchange, limits = Worker.exchange, dict[str, set[float]]()

    def watch(worker: Worker, op: str, arrays: Any = None, timeout: float | None = None, **args: Any) -> Any:
        limits.setdefault(op, set()).add(worker._workers.call_s if timeout is None else timeout)
        return exchange(worker, op, arrays, timeout, **args)

    monkeypatch.setattr(Worker, "exchange", watch)
    assert run(tmp_path / "out", tiny("bert"), [{"pass": "use_sdpa", "timeout": 777}]).exit_code == 0
    assert limits["device"] == {CALL_S} and limits["open"] >= {CALL_S, 777}
    of_step = {"cover", "outputs", "run", "time", "sampled", "stats", "effects", "fingerprint", "replay", "weights"}
    assert all(777 in limits[op] for op in of_step), limits


@pytest.mark.parametrize(("steps", "tensor", "said"), [
    (LADDER, "word_embeddings", "rows of the table"),
    ([{"pass": "use_sdpa"}, {"pass": "build_native"}], "layer.0.output.dense", "FFN_OUT of layer 0 is not the checkpoint's"),
])  # fmt: skip
def test_an_artefact_of_another_checkpoint_in_one_row(steps: list[dict[str, str]], tensor: str, said: str, tiny: Tiny, tmp_path: Path) -> None:
    """INT8 hides one wrong id among all, and one channel of a product: the artefact counted as the same model."""
    from safetensors.torch import load_file, save_file

    if steps[-1]["pass"] == "build_native":
        pytest.importorskip("bertopt_native")
    model, other = tiny(), tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    table = next(found for name, found in weights.items() if name.endswith(f"{tensor}.weight"))
    table[-3] = table[-2] if tensor == "word_embeddings" else table[-3] * 1.2
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert run(tmp_path / "out", model, steps).exit_code == 0
    artefact = tmp_path / "out" / "artifact"
    assert verify(artefact, str(model)).exit_code == 0
    found = verify(artefact, str(other))
    assert found.exit_code == 3 and said in str(found.reason)
