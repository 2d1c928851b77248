"""Figures as text, for the terminal table, the markdown table and the HTML page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bertopt.results import Latency, Margin, Parity, Quality, Report, Stage, holds, is_least
from bertopt.results.coverage import Coverage
from bertopt.results.fidelity import Certificate, Rounding

NONE = "–"
#: What a run with `timing: {quick: true}` must say.
QUICK = "a first look (quick): few rounds, so wide intervals; run again without it for verdicts"
#: The columns, in the order they are shown.
COLUMNS = ("stage", "status", "changed", "parity", "ms", "rate", "verdict", "size", "quality")
#: Those that hold a number.
NUMBERS = ("ms", "rate", "size", "quality")


@dataclass(frozen=True)
class Row:
    """One stage: its place in the tree, the words of its cells, and briefer words for narrow places."""

    stage: Stage
    tree: str
    cells: dict[str, str]
    brief: dict[str, str]

    @property
    def missed(self) -> bool:
        """Whether the stage missed its parity limits and the recipe does not allow for it (`on_fail: skip`)."""
        return bool(self.stage.parity and not self.stage.parity.passed and self.stage.status != "skipped")


@dataclass(frozen=True)
class Grid:
    """The table as words. `heads` has only the columns that some stage fills."""

    heads: dict[str, str]
    rows: list[Row]


def grid(report: Report) -> Grid:
    shape = largest_shape(report)
    mixed = any(stage.mix() for stage in report.stages)
    rows = [_row(stage, tree, shape, mixed) for tree, stage in tree_order(report.stages)]
    metrics = {stage.quality.metric for stage in report.stages if stage.quality}
    heads = {
        "stage": "stage",
        "status": "status",
        "changed": "changed",
        "parity": "worst parity",
        "ms": f"ms {shape[0]}×{shape[1]}" if shape else "ms",
        "rate": "texts/s",
        "verdict": "vs reference" if mixed or not shape else f"vs reference {shape[0]}×{shape[1]}",
        "size": "MB",
        "quality": metrics.pop() if len(metrics) == 1 else "quality",
    }
    filled = {key for row in rows for key, text in row.cells.items() if text != NONE} | {"stage", "status"}
    return Grid({key: heads[key] for key in COLUMNS if key in filled}, rows)


def _row(stage: Stage, tree: str, shape: tuple[int, int] | None, mixed: bool) -> Row:
    timed, mix = shape_case(stage, shape), stage.mix()
    compared = mix if mixed else timed
    ratio = compared.vs_reference if compared else None
    cells = {
        "stage": stage.name,
        "status": ", ".join(status(stage)),
        "changed": changes(stage.changes),
        "parity": parity(stage.parity) if stage.parity else NONE,
        "ms": f"{timed.p50_ms:.2f}" if timed else NONE,
        "rate": count(mix.texts_per_s) if mix else NONE,
        "verdict": str(ratio) if ratio else ("reference" if compared and stage.pass_ is None else NONE),
        "size": megabytes(stage.size_bytes) if stage.size_bytes is not None else NONE,
        "quality": quality(stage.quality, stage.pass_ is None) if stage.quality else NONE,
    }
    brief = {"changed": changes(stage.changes, 1)}
    if stage.quality:
        brief["quality"] = quality(stage.quality, stage.pass_ is None, interval=False)
    if ratio:
        brief["verdict"] = ratio.brief()
    if stage.parity:
        brief["parity"] = f"{stage.parity.worst.metric} {digits(stage.parity.worst.value, stage.parity.worst.limit)}"
    return Row(stage, tree, cells, brief)


def is_quick(recipe: Mapping[str, Any]) -> bool:
    """Whether a recipe asks for brief timing."""
    return bool((recipe.get("timing") or {}).get("quick"))


def baselines(report: Report) -> str:
    """Return the speed of the checkpoint in plain torch with less precision; empty where it was not timed."""
    last = {kind: cases[-1] for kind, cases in report.baselines.items() if cases}
    words = [f"{kind} {case.vs_reference}, {case.what}" for kind, case in last.items() if case.vs_reference]
    return f"the checkpoint as torch alone runs it, against fp32: {'; '.join(words)}" if words else ""


def head_to_head(report: Report) -> str:
    """`int8 FASTER 1.92x [1.80, 2.05] against bf16`, …: the races between the fastest stages; empty where there were none."""
    return "; ".join(f"{race.stage} {race.ratio} against {race.other}" for race in report.head_to_head)


def status(stage: Stage) -> list[str]:
    """Return `ok` or another status, with the most important remark."""
    return [stage.status, *(["waived"] if stage.waived else []), *(["reused"] if stage.reused else [])]


def notes(stage: Stage) -> Iterator[tuple[str, str]]:
    """Return remarks, each with its kind: why a stage is not ok, which stage added the difference, what is waived."""
    if stage.reason:
        yield "reason", stage.reason
    wrong = stage.parity is not None and (not stage.parity.passed or stage.waived)
    if wrong and (words := blame(stage)):
        yield "blame", words
    for waived in stage.waived:
        yield "waived", waived


def coverage(found: Coverage) -> str:
    """`100 % of ids, 100 % of positions, 100 % of batch sizes, 61 % of lengths`, …: what was run at least once."""
    names = ("ids", "positions", "batch_sizes", "lengths", "text_lengths", "token_types")
    shares = {name.replace("_", " "): share for name in names if (share := getattr(found, name)) is not None}
    # Rounded down: 100 % is said of all alone.
    return ", ".join(f"{math.floor(100 * share)} % of {name}" for name, share in shares.items())


def rounding(found: Rounding) -> str:
    """`error on real texts 0.65× that of the simulated rounding`."""
    return f"error on real texts {found.error_ratio:.2f}× that of the simulated rounding"


def certificate(found: Certificate) -> str:
    """`weights certified: 103 tensors compared with the parent's`, with the reason where they are not."""
    if found.status == "certified":
        return f"weights certified: {found.weights} tensors compared with the parent's"
    return f"weights {'contradict their parent' if found.status == 'contradicted' else 'not certified'}: {found.reason}"


def blame(stage: Stage) -> str | None:
    """`most of the error comes from 'bf16': rel_l2 0.02 against its parent, of 0.021 against the reference`."""
    found = stage.parity.blame if stage.parity else None
    if found is None:
        return None
    who = "this pass itself" if found.stage == stage.name else f"'{found.stage}'"
    return (
        f"most of the error comes from {who}: rel_l2 {figure(found.rel_l2, 3)} against its parent, "
        f"of {figure(found.total, 3)} against the reference"
    )


def tree_order(stages: list[Stage]) -> Iterator[tuple[str, Stage]]:
    """Every stage after its parent and beside its siblings, with the branch glyphs before its name."""
    names = {stage.name for stage in stages}

    def below(parent: str | None, lead: str) -> Iterator[tuple[str, Stage]]:
        children = [stage for stage in stages if (stage.after if stage.after in names else None) == parent]
        for child in children:
            last = child is children[-1]
            yield ("" if parent is None else lead + ("└ " if last else "├ ")), child
            yield from below(child.name, "" if parent is None else lead + ("  " if last else "│ "))

    return below(None, "")


def largest_shape(report: Report) -> tuple[int, int] | None:
    """The largest [B, S] that was timed."""
    shapes = [
        (case.batch, case.sequence)
        for stage in report.stages
        for case in stage.latency or []
        if case.batch is not None and case.sequence is not None
    ]
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape), default=None)


def shape_case(stage: Stage, shape: tuple[int, int] | None) -> Latency | None:
    cases = [case for case in stage.latency or [] if case.kind == "shape"]
    return next((case for case in cases if (case.batch, case.sequence) == shape), None)


def changes(counts: Mapping[str, int], most: int = 2) -> str:
    """`attention_calls 6`; what was not changed is left out, and what is beyond `most` is counted."""
    done = [f"{key} {value:,}" for key, value in counts.items() if value]
    if not done:
        return "nothing" if counts else NONE
    return ", ".join(done[:most]) + (f" +{len(done) - most}" if len(done) > most else "")


def parity(found: Parity) -> str:
    """`cosine_min 0.9931 ≥ 0.98`, or how the limit was missed."""
    worst = found.worst
    failed = holds(worst.metric, worst.value, worst.limit) and not found.passed
    return f"{worst.metric} {beside(worst.value, worst.limit, is_least(worst.metric))}" + (", failed" if failed else "")


def margin(found: Margin) -> str:
    """`error_ratio_max 1.04 ≤ 1.3`, or how the limit is missed."""
    return f"{margin_name(found)} {beside(found.value, found.limit, found.least)}"


def margin_name(found: Margin) -> str:
    """`error_ratio_max`, or of the coverage sweeps `coverage, one row`."""
    return f"coverage, {found.metric}" if found.gate == "coverage" else found.metric


def beside(value: float, limit: float, least: bool) -> str:
    """`1.04 ≤ 1.3`: a figure and its limit, which is the `least` or the most that passes."""
    text = digits(value, limit)
    if math.isnan(value):
        return f"{text}, not {'≥' if least else '≤'} {limit:g}"
    sign = ("≥" if value >= limit else "<") if least else ("≤" if value <= limit else ">")
    return f"{text} {sign} {limit:g}"


def digits(value: float, limit: float) -> str:
    """The value, with as many digits as it takes to see on which side of the limit, and of 1, it is."""
    for many in range(4, 17):
        text = figure(value, many)
        if all(_side(float(text), mark) == _side(value, mark) for mark in (limit, 1.0)):
            break
    return text


def _side(value: float, mark: float) -> tuple[bool, bool]:
    return value < mark, value > mark


def figure(value: float, digits: int = 4) -> str:
    return "NaN" if math.isnan(value) else f"{value:.{digits}g}"


def times(value: float) -> str:
    """How many times one figure is another: `3.7×`, `42×`, `>10,000×`."""
    return ">10,000×" if value > 10_000 else f"{value:.1f}×" if value < 9.95 else f"{value:,.0f}×"


def quality(found: Quality, reference: bool = False, interval: bool = True) -> str:
    """`0.868 (−0.002)`, with the change's interval where it is known; the reference has no change to show."""
    value = "NaN" if math.isnan(found.value) else f"{found.value:.3f}"
    if reference:
        return value
    change = signed(found.change)
    if interval and found.change_low is not None and found.change_high is not None:
        change += f" [{signed(found.change_low)}, {signed(found.change_high)}]"
    return f"{value} ({change})"


def signed(change: float) -> str:
    text = f"{abs(change):.3f}".replace("nan", "NaN")
    return ("±" if text in ("0.000", "NaN") else "−" if change < 0 else "+") + text


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or not math.isfinite(value) else f"{value:.1f}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f}" if size >= 50_000 else f"{size / 1e6:.2f}"


def line(row: Row) -> str:
    """`quantize_int8: ok, cosine_min 0.9931, FASTER 2.41x, 23.4 MB`, with the reason where there is one."""
    words = [row.cells["status"]]
    words += [row.brief[key] for key in ("parity", "verdict") if key in row.brief]
    words += [f"{row.cells['size']} MB"] if row.cells["size"] != NONE else []
    reason = f" ({one_line(row.stage.reason)})" if row.stage.reason else ""
    return f"{row.stage.name}: {', '.join(words)}{reason}"


def one_line(text: str) -> str:
    """Return text printable on one line: reasons may come from a compiler's log."""
    return " ".join(clean(text).split())


def clean(text: str) -> str:
    """Without terminal colours and control characters; the lines stay."""
    text = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text)
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def flat(facts: Mapping[str, Any], lead: str = "") -> dict[str, str]:
    """Nested facts as `torch.version: 2.11`."""
    found: dict[str, str] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{lead}{key}.")
        elif isinstance(value, (list, tuple)):
            found[f"{lead}{key}"] = ", ".join(str(item) for item in value) or NONE
        else:
            found[f"{lead}{key}"] = NONE if value is None else str(value)
    return found
