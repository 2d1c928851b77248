"""The report page in a real browser: nothing said, nothing asked for, nothing cut off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertopt.report import html
from bertopt.results import Ratio, Report
from tests.support.chromium import BINARY, Chromium
from tests.support.reports import full

pytestmark = pytest.mark.skipif(BINARY is None, reason="needs chromium or google-chrome: apt-get install chromium")
QUICKSTART = Path(__file__).parents[2] / "benchmarks" / "results" / "quickstart.json"


def wild() -> Report:
    """A quick run on a busy machine: its longest verdicts."""
    found = full()
    for case in (case for stage in found.stages[1:] for case in stage.latency or []):
        case.vs_reference = case.vs_parent = Ratio(ratio=31_339.1, low=0.02, high=146_051.4)
    found.stages[0].size_bytes, found.stages[0].peak_rss_bytes = 2_438_000_000, 9_138_000_000
    return found


REPORTS = {
    "passed": full(),
    "failed": full(failed=True),
    "wild": wild(),
    "quickstart": Report.model_validate_json(QUICKSTART.read_bytes()),
}
#: Elements that reach beyond the page; what scrolls by itself may be wider.
OVERFLOWING = """[...document.querySelectorAll('main *')].filter(each => {
  if (each.closest('.scroll') && !each.matches('.scroll') || each.closest('title')) return false;
  const box = each.getBoundingClientRect();
  return box.width && (box.right > WIDTH + 0.5 || box.left < -0.5);
}).map(each => each.outerHTML.slice(0, 120))"""
#: Text of a chart beyond its picture, where it is cut off.
CUT_OFF = """[...document.querySelectorAll('svg.chart')].flatMap(chart => { const whole = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('text, circle, line, rect')].filter(each => { const box = each.getBoundingClientRect();
    return box.left < whole.left - 1 || box.right > whole.right + 1 || box.top < whole.top - 1 || box.bottom > whole.bottom + 1;
  }).map(each => each.outerHTML.slice(0, 120)); })"""
#: Text of the charts that lies over other text.
COLLIDING = """[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  const all = [...chart.querySelectorAll('text')].map(each => [each, each.getBoundingClientRect()]).filter(([, b]) => b.width);
  return all.flatMap(([a, x], i) => all.slice(i + 1).filter(([, y]) =>
    x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 5 && y.top < x.bottom - 5)
    .map(([b]) => a.textContent + ' | ' + b.textContent));
})"""
#: Contrast (WCAG) of every visible text of the page against the nearest opaque background.
CONTRAST = """(() => {
  const light = css => { const [r, g, b] = css.match(/[\\d.]+/g).map(v => v / 255).map(v =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (/^rgb\\(/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('main *, svg.chart text')].filter(e => e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
      const style = getComputedStyle(e), a = light(e.matches('svg *') ? style.fill : style.color), b = light(ground(e));
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 90)]; });
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module", params=REPORTS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("page") / f"{request.param}.html"
    html.write(REPORTS[request.param], path)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 820, 390])
def test_quiet_whole_and_legible(browser: Chromium, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width, dark)
    browser.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.ask(OVERFLOWING.replace("WIDTH", str(width))) == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.ask(CUT_OFF) == []
    assert browser.ask(COLLIDING) == []
    table = browser.ask("(box => [box.clientWidth, box.scrollWidth])(document.querySelector('.stages').parentElement)")
    assert table[0] <= width and (table[0] == table[1] or width < 1280)
    assert browser.ask("document.querySelectorAll('script, img, iframe, link, object').length") == 0
    contrasts = browser.ask(CONTRAST)
    assert len(contrasts) > 100
    assert [text for contrast, text in contrasts if not contrast >= 4.4] == []
    sizes = browser.ask(
        "[...document.querySelectorAll('svg.chart')].filter(e => e.checkVisibility())"
        ".map(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
    )
    assert len(sizes) == 3
    # The smallest letters of a chart are 11.5 pixels high.
    assert min(sizes) > 0.65
    said = [event for event in browser.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
    said += [event for event in browser.events if event["method"] == "Runtime.consoleAPICalled"]
    assert not said
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]


def test_schemes_differ(browser: Chromium, page: Path) -> None:
    grounds = []
    for dark in (False, True):
        browser.open(page, 1280, dark)
        grounds.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(246, 247, 249)", "rgb(17, 20, 24)"]


def test_prints(browser: Chromium, page: Path) -> None:
    browser.open(page, 1280, dark=True)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b(?!s)", printed)) >= 2
    browser.open(page, 718)  # A4 without its margins
    browser.call("Emulation.setEmulatedMedia", media="print")
    # On paper it is light, every stage is unfolded, and nothing hides behind a scroll bar.
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("[...document.querySelectorAll('details h3')].every(each => each.checkVisibility())")
    assert browser.ask("[...document.querySelectorAll('main *')].filter(e => !e.closest('title') && "
                       "e.getBoundingClientRect().right > 718.5).map(e => e.outerHTML.slice(0, 120))") == []  # fmt: skip
    browser.call("Emulation.setEmulatedMedia", media="")


def test_hostile_text_is_text(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    html.write(full(failed=True), path)
    browser.open(path, 1280)
    text = browser.ask("document.body.textContent")
    assert "<script>alert('1')</script> & \"quotes\" </style><img src=x onerror=alert(2)>" in text
    assert "{{ 7 * 7 }}" in text
    assert not set(text) & {"\x1b", "\u2028"}
    assert browser.ask("document.querySelector('mark').textContent").startswith("<script>")
    assert browser.ask("document.styleSheets.length") == 1
