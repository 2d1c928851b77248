"""The table of what the parts measured, in Markdown; what failed; what was missing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Parts = Mapping[str, Mapping[str, Any]]
#: What was measured of one case, by name.
Rows = Mapping[str, Mapping[str, Any]]
#: Shapes shown; all are in the files.
SHOWN = ("1x128", "8x128", "32x128", "128x128", "32x512")
QUICK_SHOWN = ("1x16", "4x16")
#: Of right answers; fp8 and int8 with random weights are nearer.
LEAST_COSINE = 0.95


def markdown(parts: Parts) -> str:
    """One text: hardware, peaks, times by shape, end to end, what was missing."""
    lines: list[str] = []
    for part in parts.values():
        there = part["environment"]
        packages = ", ".join(f"{name} {version}" for name, version in there["packages"].items())
        lines += [f"{there.get('gpu') or 'CPU'}, CUDA {there.get('cuda')}; {packages}; Python {there['python']}", ""]
        break
    peaks = _peaks(parts)
    if peaks:
        lines += ["| matrix products | TFLOP/s |", "| :-- | --: |", *(f"| {kind} | {value:.4g} |" for kind, value in peaks.items()), ""]
    quick = any(part["setting"][1] for part in parts.values())
    # Of tiny shapes a share means nothing.
    lines += [*_smoke(parts), *_times(parts, {} if quick else peaks), *_mix(parts), *_builds(parts), *_recipes(parts)]
    missing = sorted({f"{part}/{case}: {reason}" for part, case, key, reason in _said(parts, "missing") if key in ("missing", "run")})
    ended: dict[str, list[str]] = defaultdict(list)
    for name, case, key, reason in _said(parts, "missing"):
        if reason == "out of memory":
            ended[f"{name}/{case}"].append(key)
    missing += [f"{case}: out of memory at {', '.join(sorted(shapes, key=_size))}" for case, shapes in sorted(ended.items())]
    if missing:
        lines += ["Missing:", "", *(f"- {line}" for line in missing), ""]
    waiting = [f"{name} ({len(part['unfinished'])} cases)" for name, part in parts.items() if part.get("unfinished")]
    if waiting:
        lines += [f"Unfinished: {', '.join(waiting)}", ""]
    return "\n".join(lines)


def _size(shape: str) -> int:
    rows, tokens = shape.split("x")
    return int(rows) * int(tokens)


def failures(parts: Parts) -> list[str]:
    """Cases that ended with an error, that a GPU should have run, or whose answers are wrong: what is missing is none."""
    ended = [f"{part}/{case}: {reason}" for part, case, _, reason in _said(parts, "failure")]
    return ended + [
        f"{part}/{case}: wrong answers: rel_l2 {figures['rel_l2']:.3g}, least cosine {figures['cosine_min']:.3g} to float32"
        for part in parts
        for case, entry in parts[part]["cases"].items()
        if (figures := entry["rows"].get("parity")) and not figures["cosine_min"] >= LEAST_COSINE
    ]


def _said(parts: Parts, word: str) -> Iterator[tuple[str, str, str, str]]:
    for name, part in parts.items():
        for case, entry in part["cases"].items():
            for key, row in entry["rows"].items():
                if word in row:
                    yield name, case, key, str(row[word])


def _rows(parts: Parts, part: str, case: str) -> dict[str, Any]:
    found: dict[str, Any] = parts.get(part, {}).get("cases", {}).get(case, {}).get("rows", {})
    return found


def _peaks(parts: Parts) -> dict[str, float]:
    best: dict[str, float] = defaultdict(float)
    for row in _rows(parts, "smoke", "peaks").values():
        if "tflops" in row:
            best[row["kind"]] = max(best[row["kind"]], row["tflops"])
    return dict(best)


def _smoke(parts: Parts) -> list[str]:
    lines = [f"- {line}" for case, described in _SMOKE.items() for line in described(_rows(parts, "smoke", case))]
    return [*lines, ""] if lines else []


def _copies(rows: Rows) -> Iterator[str]:
    yield from (f"copies, {key}: {row['gb_per_s']:.4g} GB/s" for key, row in rows.items() if "gb_per_s" in row)


def _small_kernels(rows: Rows) -> Iterator[str]:
    yield from (f"{key}: {1e3 * row['p50_ms']:.4g} µs" for key, row in rows.items() if "p50_ms" in row)


def _package(rows: Rows) -> Iterator[str]:
    for key, row in rows.items():
        if "exit_code" in row:
            yield f"package, {key}: exit code {row['exit_code']}, in stage '{row.get('stage')}'"


def _masked_rows(rows: Rows) -> Iterator[str]:
    bad = [key for key, row in rows.items() if row.get("finite") is False]
    if rows:
        yield f"fully masked rows: {'NOT finite in ' + ', '.join(bad) if bad else 'finite'} ({len(rows)} cases)"


def _graphs(rows: Rows) -> Iterator[str]:
    yield from (f"compile_torch over {len(row['lengths'])} lengths: {row['graphs']} graphs" for row in rows.values() if "graphs" in row)


def _tests(rows: Rows) -> Iterator[str]:
    if rows:
        ended, whole = Counter(str(row["outcome"]) for row in rows.values() if "outcome" in row), rows.get("pytest", {})
        counts = [f"{number} {outcome}" for outcome, number in sorted(ended.items())]
        counts += [f"{whole['collected']} collected"] if "collected" in whole else []
        yield f"pytest -m gpu: {', '.join(counts) or 'nothing ran'}, exit code {whole.get('exit_code', '–')}"


def _races(rows: Rows) -> Iterator[str]:
    races = [row for row in rows.values() if "verdict" in row]
    if races:
        yield f"A/A races: {sum(row['false_verdict'] for row in races)} of {len(races)} gave a verdict that is false"


#: What is said of each case of the part `smoke`.
_SMOKE: dict[str, Callable[[Rows], Iterator[str]]] = {
    "copies": _copies, "small_kernels": _small_kernels, "package": _package, "masked_rows": _masked_rows, "graphs": _graphs,
    "pytest": _tests, "aa": _races,
}  # fmt: skip


def _times(parts: Parts, peaks: Mapping[str, float]) -> list[str]:
    lines: list[str] = []
    for part in ("torch", "onnxruntime", "tensorrt"):
        cases = parts.get(part, {}).get("cases", {})
        shown = QUICK_SHOWN if parts.get(part, {}).get("setting", ["", False])[1] else SHOWN
        if not any(shape in entry["rows"] for entry in cases.values() for shape in shown):
            continue
        lines += [f"{part}, ms (share of the measured peak)", "", f"| case | {' | '.join(shown)} | memory | largest × 512 | rel_l2 | cosine |",
                  "| :-- |" + " --: |" * (len(shown) + 4)]  # fmt: skip
        for case, entry in cases.items():
            rows = entry["rows"]
            timed = [row for row in rows.values() if "p50_ms" in row]
            if not timed:
                continue
            cells = [_cell(rows.get(shape), peaks) for shape in shown]
            held = max((row.get("process_bytes") or row.get("torch_peak_bytes") or 0 for row in timed), default=0)
            parity = rows.get("parity", {})
            figures = [f"{parity[name]:.3g}" if name == "rel_l2" else f"{parity[name]:.6f}" for name in ("rel_l2", "cosine_min") if name in parity]
            cells += [f"{held / 2**30:.2f} GiB" if held else "–", str(rows.get("largest", {}).get("largest_batch", "–")), *(figures or ["–", "–"])]
            lines.append(f"| {case} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _cell(row: Mapping[str, Any] | None, peaks: Mapping[str, float]) -> str:
    if row is None or "p50_ms" not in row:
        return "–"
    peak = peaks.get(row["peak_kind"])
    return f"{row['p50_ms']:.4g}" + (f" ({row['tflops'] / peak:.0%})" if peak else "")


def _mix(parts: Parts) -> list[str]:
    cases = {case: entry["rows"] for case, entry in parts.get("mix", {}).get("cases", {}).items() if "offline" in entry["rows"]}
    if not cases:
        return []
    keys = list(dict.fromkeys(key for rows in cases.values() for key in rows))
    lines = ["end to end, texts/s", "", f"| case | {' | '.join(keys)} |", "| :-- |" + " --: |" * len(keys)]
    for case, rows in cases.items():
        cells = [f"{rows[key]['texts_per_s']:,.0f}" if key in rows else "–" for key in keys]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return [*lines, ""]


def _builds(parts: Parts) -> list[str]:
    built = {case: entry["rows"]["build"] for case, entry in parts.get("tensorrt", {}).get("cases", {}).items() if "build" in entry["rows"]}
    lines = [
        f"- {case}: {row['version']} for {', '.join(row['targets'])}, {row['build_s']:.1f} s, {row['size_bytes'] / 1e6:.1f} MB"
        for case, row in built.items()
    ]
    return ["engines", "", *lines, ""] if lines else []


def _recipes(parts: Parts) -> list[str]:
    lines: list[str] = []
    for case, entry in parts.get("recipes", {}).get("cases", {}).items():
        if (row := entry["rows"].get("export")) is None:
            continue
        codes = {key: entry["rows"].get(key, {}).get("exit_code") for key in ("export", "verify", "open")}
        ended = ", ".join(f"{key} {'–' if code is None else code}" for key, code in codes.items())
        about = f"; weights are {row['weights']}" if "weights" in row else ""
        lines += [f"- {case}: exit codes {ended}; {row['seconds']:.0f} s{about}"]
        for stage in row.get("stages", ()):
            why = f": {stage['reason']}" if stage["reason"] else ""
            speed = f", {stage['mix']['texts_per_s']:,.0f} texts/s" if stage["mix"] else ""
            chosen = ", delivered" if stage["name"] == row.get("delivered") else ""
            lines.append(f"  - {stage['name']}: {stage['status']}{speed}{chosen}{why}")
    return ["shipped recipes", "", *lines, ""] if lines else []
