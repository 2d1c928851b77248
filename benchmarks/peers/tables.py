"""A result as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.figures import BY_CALL, BY_CPU, figures
from bertopt.report.svg import Svg, share_axis

Race = Mapping[str, Any]
#: Scenarios whose figures are times of a call or a text.
HEADS = {BY_CALL: f"{BY_CALL}, ms", BY_CPU: f"{BY_CPU}, CPU ms a text"}


def scenarios(race: Race) -> list[str]:
    """In the order in which they are listed in the result."""
    timed = {turn["scenario"] for turn in race["turns"]}
    return [scenario["name"] for scenario in race["scenarios"] if scenario["name"] in timed]


def markdown(document: Mapping[str, Any], file: str = "cpu_peers") -> str:
    """A table for each checkpoint, and what it was measured on; `file` is the result's name."""
    parts = [table(race) for race in document["models"].values() if race["turns"]]
    environment, settings = document["environment"], document["settings"]
    where = f"{environment['cores']} cores of {environment['cpu']} ({', '.join(environment['isa'])})"
    masked = f"; what is beyond {settings['isa']} was masked from the native encoder" if settings.get("isa") else ""
    parts.append(
        f"Measured on {where}, {settings['threads']} threads each{masked}; [raw figures](benchmarks/results/{file}.json).\n"
    )
    return "\n".join(parts)


def table(race: Race) -> str:
    """Contenders × scenarios: texts/s, or ms of a short query; × is how many times faster than the scenario's best peer."""
    names = scenarios(race)
    by = {scenario: {row["contender"]: row for row in figures(race, scenario)} for scenario in names}
    heads = [HEADS.get(name, f"{name}, texts/s") for name in names]
    lines = [
        f"**{race['title']}** ({'accuracy, agreement' if race['labelled'] else 'mean and least cosine'} against float32)",
        "", f"| | {' | '.join(heads)} | fidelity | memory, MiB | load, s |", "| :-- |" + " --: |" * (len(heads) + 3),
    ]  # fmt: skip
    order = sorted(race["contenders"].items(), key=lambda item: not item[1]["peer"])
    for name, contender in order:
        if contender.get("failed"):
            lines.append(f"| {name} | {' | '.join('—' for _ in names)} | {cell(contender['failed'])} | — | — |")
            continue
        cells = [figure(by[scenario].get(name), scenario) for scenario in names]
        label = name if contender["peer"] else f"**{name}**"
        lines.append(f"| {label} | {' | '.join(cells)} | {accuracy(contender)} | {cost_to_open(contender)} |")
    notes = [near(race, by)] if near(race, by) else []
    notes += [f"Warning: {warning}." for warning in race.get("warnings", [])]
    return "\n".join([*lines, "", *notes]) + "\n"


def cell(words: str) -> str:
    return words.replace("|", "/").replace("\n", " ")[:120]


def figure(row: Mapping[str, Any] | None, scenario: str) -> str:
    if row is None:
        return "—"
    rate = row["texts_per_s"]
    value = f"{row['ms']:.2f}" if scenario in HEADS else f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
    if row["best"]:
        return f"{value} best peer"
    against = row["vs_best"]
    return value if row["peer"] or against is None else f"{value} ({times(against)})"


def times(found: Mapping[str, Any]) -> str:
    return f"×{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def near(race: Race, by: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Near-lossless artefacts against the best near-lossless peer."""
    found = []
    for name, contender in race["contenders"].items():
        rows = {s: r[name]["vs_near_lossless"] for s, r in by.items() if name in r and r[name]["vs_near_lossless"]}
        if not contender["peer"] and rows:
            found.append(f"{name}: {', '.join(f'{s} {times(r)}' for s, r in rows.items())}")
    return f"Against the best near-lossless peer (mean cosine ≥ 0.9999): {'; '.join(found)}." if found else ""


def accuracy(contender: Mapping[str, Any]) -> str:
    found = contender.get("fidelity", {})
    if "accuracy" in found:
        return f"{found['accuracy']:.3f}, {found['agreement']:.1%}"
    return f"{found['cosine_mean']:.5f}, {found['cosine_min']:.4f}" if found else "—"


def cost_to_open(contender: Mapping[str, Any]) -> str:
    """Peak memory of the process, libraries included, and seconds to import and open."""
    facts = contender.get("facts", {})
    return f"{facts.get('peak_rss_mib', '—')} | {facts['load_s']:.1f}" if "load_s" in facts else "— | —"


def picture(race: Race) -> str:
    """Bars of speed relative to the best peer, one group a scenario; ours are coloured, with their intervals."""
    names = scenarios(race)
    left, right, step = 300, 860, 20
    found = {scenario: figures(race, scenario) for scenario in names}
    largest = max([1.25, *(speed(row, rows) for rows in found.values() for row in rows)]) * 1.05
    axis = share_axis(largest, left, right)
    svg = Svg(900, f"{race['title']}: speed of each contender relative to the best peer")
    bottom = 30 + sum(26 + step * len(rows) for rows in found.values())
    axis.draw(svg, 24, bottom)
    y = 30.0
    for scenario, rows in found.items():
        svg.text(0, y + 14, scenario, "strong")
        y += 22
        for row in sorted(rows, key=lambda row: row["ms"]):
            share = speed(row, rows)
            svg.name(12, y + 12, row["contender"], left - 24, "name" if not row["peer"] else "soft")
            svg.rect(left, axis.at(share), y + 2, step - 6, "base" if row["peer"] else "best")
            if row["vs_best"] and not row["peer"]:
                axis.whisker(svg, row["vs_best"]["low"], row["vs_best"]["high"], y + step / 2 - 1)
            y += step
        y += 4
    return svg.finish(bottom + 6, alone=True)


def speed(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """How many times as fast as the scenario's best peer, or as the fastest where no peer ran."""
    best = [other["ms"] for other in rows if other["best"]] or [min(other["ms"] for other in rows)]
    return float(best[0] / row["ms"])
