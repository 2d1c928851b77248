"""The report's pictures, its details and what shows it outside the page."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import bertopt
from bertopt.cli import main
from bertopt.errors import Unsupported, UsageError
from bertopt.recipe.parser import load
from bertopt.report import charts, formatting, html, stage_details, terminal
from bertopt.report.limit_margins import marks
from bertopt.report.svg import WIDTH, Svg, log_axis, share_axis, style
from bertopt.results import Latency, Ratio, Report, Worst
from tests.support.reports import EVIL, LONG, full

QUICKSTART = Path(__file__).parents[3] / "benchmarks" / "results" / "quickstart.json"
SVG = "{http://www.w3.org/2000/svg}"


def drawn(report: Report, name: str) -> ET.Element:
    text = charts.PICTURES[name](report, True)
    assert text is not None
    return ET.fromstring(text)


def texts(picture: ET.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def bars(picture: ET.Element, kind: str) -> list[tuple[float, float]]:
    """Left and right end of every bar of a kind."""
    found = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == kind]
    return [(float(each.attrib["x"]), float(each.attrib["x"]) + float(each.attrib["width"])) for each in found]


def test_a_bar_runs_from_the_parent_to_the_stage() -> None:
    stages = full().stages[:3]
    halved = Latency(kind="mix", batch=None, sequence=None, n=12, p50_ms=20, p90_ms=21, p99_ms=None, texts_per_s=600,
                     vs_reference=Ratio(ratio=2.0, low=1.9, high=2.1),
                     vs_parent=Ratio(ratio=1.5, low=1.25, high=1.6))  # fmt: skip
    stages[2] = stages[2].model_copy(update={"latency": [halved]})
    picture = drawn(full().model_copy(update={"stages": stages}), "latency")
    [(zero, one)] = bars(picture, "base")
    share = [(x - zero) / (one - zero) for x in bars(picture, "gain")[1]]
    assert share == pytest.approx([0.5, 0.75], abs=1e-3)
    [begin, end] = [
        (float(each.attrib["x1"]), float(each.attrib["x2"]))
        for each in picture.iter(f"{SVG}line")
        if each.get("class") == "whisker" and each.attrib["y1"] == each.attrib["y2"]
    ][1:]
    assert [(x - zero) / (one - zero) for x in begin] == pytest.approx([0.75 / 1.6, 0.75 / 1.25], abs=1e-3)
    assert [(x - zero) / (one - zero) for x in end] == pytest.approx([1 / 2.1, 1 / 1.9], abs=1e-3)


def test_each_verdict_has_its_look() -> None:
    picture = drawn(full(), "latency")
    assert [len(bars(picture, kind)) for kind in ("base", "gain", "loss", "unsure", "best")] == [1, 4, 1, 1, 1]
    words = texts(picture)
    assert "SLOWER 0.58x [0.56, 0.60]" in words
    assert "cast_half (failed)" in words
    assert "delivered, in all" in words
    assert "delivered, in all" not in texts(drawn(full(failed=True), "latency"))


def test_a_ratio_that_is_none_draws_no_bar() -> None:
    found = full()
    bad = Ratio(ratio=math.nan, low=math.nan, high=math.nan)
    for case in found.stages[1].latency or []:
        case.vs_parent = bad
    picture = drawn(found, "latency")
    assert "not raced" in texts(picture)
    assert "nan" not in ET.tostring(picture, encoding="unicode").lower()


def test_marks_are_distances_with_their_limits() -> None:
    rows = {each.name: {mark.metric: mark for mark in marks(each)} for each in full().stages}
    mark = rows["use_sdpa"]["1 − cosine_min"]
    assert (mark.value, mark.limit, mark.held) == (pytest.approx(1e-10), pytest.approx(1e-6), True)
    assert rows["use_sdpa"]["max_abs"].room == "50× room"
    assert rows["use_sdpa"]["label flips"].room == "over"
    assert rows[LONG]["rel_l2"].room == "1.3× over"
    assert rows[LONG]["error_ratio"].room == "1.3× room" and "bias" not in rows[LONG]
    assert {"invariance", "metric drop", "1 − spearman", "1 − top_k"} <= set(rows[LONG])
    assert rows["slower"]["rel_l2"].room == "exact"
    assert math.isnan(rows["cast_half"]["1 − cosine_min"].value)
    assert not rows["cast_half"]["1 − cosine_min"].held
    assert rows["reference"] == rows["fuse_ort"] == {}


def test_a_dot_beyond_its_tick_is_a_missed_limit() -> None:
    picture = drawn(full(), "parity")
    dots = list(picture.iter(f"{SVG}circle"))
    ticks = [
        float(each.attrib["x1"]) for each in picture.iter(f"{SVG}line") if each.get("class") == "limit"
    ]  # one for each dot, in the same order
    assert len(dots) == len(ticks) == sum(len(marks(each)) for each in full().stages)
    for dot, tick in zip(dots, ticks, strict=True):
        assert (float(dot.attrib["cx"]) > tick) == (dot.get("class") in ("bad", "soft"))
    assert {dot.get("class") for dot in dots} == {"good", "bad", "soft"}


def test_a_wide_interval_is_clipped_and_leaves_the_scale_to_the_ratios() -> None:
    picture = drawn(full(), "latency")
    [(zero, one)] = bars(picture, "base")
    assert one - zero > 250
    # The parent's share, 1.34 / 1.13, times the reciprocal of the interval's low end, 0.09.
    [clipped] = [each for each in picture.iter(f"{SVG}text") if each.text == "1,318 %"]
    right = max(float(each.attrib["x2"]) for each in picture.iter(f"{SVG}line") if each.get("class") == "whisker")
    assert right < float(clipped.attrib["x"]) < 860
    heads = [each for each in picture.iter(f"{SVG}line") if each.get("class") == "whisker" and float(each.attrib["x1"]) > right]
    assert len(heads) == 2, "an arrow in place of the end"


def test_an_interval_within_reach_is_drawn_whole() -> None:
    axis, svg = share_axis(1.0, 0, 100), Svg(200, "")
    axis.whisker(svg, 0.5, 1.0, 10)
    assert svg.finish(20).count("<line") == 3
    axis.whisker(svg, 0.5, 1000.0, 10)
    assert "&gt; 10,000 %" in svg.finish(20)


def test_axes() -> None:
    axis = log_axis([1e-9, 1e-3, 0.0, math.nan], 0, 500)
    assert axis.ticks[0] == (0.0, "0")
    assert (1e-9, "10⁻⁹") in axis.ticks
    places = [axis.at(value) for value in (0.0, 1e-9, 1e-6, 1e-3, math.nan)]
    assert places == sorted(places)
    assert places[2] == pytest.approx((places[1] + places[3]) / 2)
    assert [words for _, words in share_axis(1.0, 0, 100).ticks] == ["0 %", "25 %", "50 %", "75 %", "100 %"]
    assert 3 <= len(share_axis(37.0, 0, 100).ticks) <= 6


@pytest.mark.parametrize("name", charts.PICTURES)
def test_pictures_stand_alone(name: str) -> None:
    picture = drawn(full(), name)
    text = ET.tostring(picture, encoding="unicode")
    assert "var(" not in text
    assert not re.search(r"url\(|href|<script", text)
    assert picture.attrib["aria-label"]
    assert any(each.startswith("a_name") for each in texts(picture))


def test_style_has_the_pages_colours() -> None:
    assert ".chart text { fill: #1a1d23;" in style()


def test_save(tmp_path: Path) -> None:
    found = charts.save(full(), tmp_path / "new" / "pictures", ("svg",))
    assert [path.name for path in found] == ["latency.svg", "parity.svg", "size.svg"]
    assert all(ET.parse(path).getroot().tag == f"{SVG}svg" for path in found)
    with pytest.raises(UsageError, match="svg or png; got gif"):
        charts.save(full(), tmp_path, ("gif",))
    with pytest.raises(UsageError, match="nothing to draw"):
        charts.save(full().model_copy(update={"stages": []}), tmp_path)


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    for path in charts.save(full(), tmp_path, ("png",)):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20]) == 2 * (WIDTH + 40)


def test_png_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(Unsupported, match=r"pip install 'bertopt\[pictures\]'"):
        charts.save(full(), tmp_path / "p", ("svg", "png"))
    assert not (tmp_path / "p").exists()


def test_details_tell_all() -> None:
    text = html.page(full())
    for words in ("waived until 2027-01-31", "<mark title", "Most of the error comes from <b>use_sdpa</b>", "Effects of the pass", "Invariance", "Ranking",
                  "94.0 %", "0.840 to 0.894", "a line of its log", "60 before",
                  "bertopt debug recipe.yaml --stage cast_half", "bertopt export recipe.yaml --set device=cpu --out again",
                  "an odd tokenizer", "1 waived",
                  "<h3>Weights</h3>", "116 tensors compared", "<h3>Cost of the rounding</h3>", "≤ 1.3"):  # fmt: skip
        assert words in text, words
    older = Report.model_validate_json(QUICKSTART.read_bytes())
    for each in older.stages:
        # As written before these were recorded.
        each.effects, each.invariance, each.ranking = {}, None, None
        if each.parity:
            each.parity.blame = None
    bare = html.page(older)
    for words in ("Effects of the pass", "Invariance", "Ranking", "Most of the error", "<mark", "bertopt debug", "waived</span>"):
        assert words not in bare


def test_the_worst_token_stands_in_its_surroundings() -> None:
    words = [f"w{i}" for i in range(300)]
    worst = Worst(metric="rel_l2", value=1, limit=1, where="", tokens=words, token=150)
    found = stage_details.tokens(worst)
    assert [token.text for token in found if token.worst] == ["w150"]
    assert (found[0].text, found[-1].text, len(found)) == ("… 110 before", "109 more …", 83)
    short = stage_details.tokens(worst.model_copy(update={"tokens": words[:3], "token": None}))
    assert [(token.text, token.worst) for token in short] == [("w0", False), ("w1", False), ("w2", False)]


def test_the_recipe_on_the_page_can_be_run(tmp_path: Path) -> None:
    found = Report.model_validate_json(QUICKSTART.read_bytes())
    path = tmp_path / "recipe.yaml"
    path.write_text(stage_details.recipe_yaml(found.recipe), "utf-8")
    assert yaml.safe_load(path.read_text("utf-8")) == found.recipe
    again = load(path, ["device=cpu"]).resolved()
    assert [(step["name"], step["after"]) for step in again["steps"]] == [
        (step["name"], step["after"]) for step in found.recipe["steps"]
    ]


def test_waivers_blame_and_intervals_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = next(each for each in formatting.grid(full()).rows if each.stage.name == LONG)
    assert row.cells["status"] == "ok, waived"
    assert row.cells["quality"] == "0.868 (−0.002 [−0.010, +0.006])"
    assert row.brief["quality"] == "0.868 (−0.002)"
    notes = dict(formatting.notes(row.stage))
    assert notes["blame"].startswith("most of the error comes from 'use_sdpa': rel_l2 0.38")
    assert "known, see ticket 12" in notes["waived"]
    assert "ok, waived" in terminal.markdown(full())
    console = terminal.console(file=io.StringIO())
    with console.capture() as captured:
        console.print(terminal.render(full()))
    assert f"{LONG}, waived: rel_l2 must be at most 0.3" in captured.get()
    assert "cast_half, blame: most of the error comes from this pass itself" in captured.get()


@pytest.mark.parametrize(("columns", "width"), [("0", 160), ("1", 160), ("20", 20), ("90", 90)])
def test_a_terminal_without_a_width(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With COLUMNS=0, as in a container's terminal that nobody has sized, `report` printed nothing, with exit code 0."""
    monkeypatch.setenv("COLUMNS", columns)
    console = terminal.console(file=io.StringIO())
    with console.capture() as captured:
        console.print(terminal.render(full()))
    assert console.width == width and "use_sdpa" in captured.get()


def test_a_report_shows_itself_in_jupyter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = full(failed=True)
    formatters: dict[str, dict[tuple[str, str], Any]] = {kind: {} for kind in ("text/html", "text/markdown")}
    shell = SimpleNamespace(
        display_formatter=SimpleNamespace(
            formatters={
                kind: SimpleNamespace(for_type_by_name=lambda module, name, show, of=shown: of.update({(module, name): show}))
                for kind, shown in formatters.items()
            }
        )
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    report_class = bertopt.Report
    shown = {kind: by_type[report_class.__module__, report_class.__qualname__] for kind, by_type in formatters.items()}
    text = shown["text/html"](found)
    assert text.count("<tr>") == len(found.stages) + 1
    assert "FAILED" in text and "exit code 3" in text
    assert "<script" not in text and "<style" not in text and EVIL not in text
    assert shown["text/markdown"](found) == terminal.markdown(found)


def test_cli_draws_a_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(QUICKSTART), "--html", str(tmp_path / "new" / "r.html"), "--pictures", str(tmp_path / "p")])
    assert ended.value.code == 0
    assert (tmp_path / "new" / "r.html").read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == ["latency.svg", "parity.svg", "size.svg"]
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        main(["report", str(QUICKSTART)])
    assert "quantize_int8" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"schema_version": 99}, {"a_field_of_tomorrow": 1}])
def test_a_report_of_another_version_is_not_called_another_file(
    tmp_path: Path, changed: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({**json.loads(QUICKSTART.read_bytes()), **changed, "bertopt_version": "9.9"}))
    with pytest.raises(SystemExit) as ended:
        main(["report", str(path)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "was written by bertopt 9.9" in said and next(iter(changed)) in said and "or export again" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([str(QUICKSTART), "--format", "png"], "--pictures DIR"),
        ([str(QUICKSTART), "--pictures", "/dev/null/x"], "name another place"),
        ([__file__], "is not a report of bertopt"),
    ],
)
def test_cli_says_what_is_wrong(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
