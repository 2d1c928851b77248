"""The tables of README and docs about what was tried: passes by family, default limits, campaigns, races against itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bertopt.checks.parity import DEFAULT_LIMITS

#: README's forms: the pass whose support stands for each.
FORMS = {
    "torch": "cast_half", "torch.compile": "compile_torch", "native": "build_native", "packed rows": "pack_sequences", "ONNX": "export_onnx",
    "ONNX INT8": "quantize_int8", "OpenVINO": "convert_openvino", "TensorRT": "build_tensorrt",
}  # fmt: skip


def machine(environment: dict[str, Any]) -> str:
    cores = environment["cores"]
    return f"{cores} core{'' if cores == 1 else 's'} of {environment['cpu']} ({', '.join(environment['isa'])})"


def support(found: dict[str, Any]) -> str:
    """Families × forms over the tasks that each family has; families with the same row share it."""
    cells = {(cell["family"], cell["pass_"], cell["task"]): cell["outcome"] for cell in found["cells"]}
    lines = [f"| | {' | '.join(FORMS)} |", "| :-- |" + " :-- |" * len(FORMS)]
    rows: dict[str, list[str]] = {}
    for family in dict.fromkeys(key[0] for key in cells):
        row = [_word({task: cells[family, name, task] for task in _tasks(cells, family)}) for name in FORMS.values()]
        rows.setdefault(" | ".join(row), []).append(family)
    return "\n".join([*lines, *(f"| {', '.join(families)} | {row} |" for row, families in rows.items())]) + "\n"


def _word(outcomes: Mapping[str, str]) -> str:
    refused = [task for task, outcome in outcomes.items() if outcome.startswith("unsupported")]
    if refused:
        return "no" if len(refused) == len(outcomes) else f"all but {', '.join(refused)}"
    return {"ok": "yes"}.get(cell := _cell(list(outcomes.values())), cell)


def _tasks(cells: Mapping[tuple[str, str, str], str], family: str) -> list[str]:
    """The tasks that transformers has a head of the family for."""
    return list(dict.fromkeys(task for of, _, task in cells if of == family))


def limits(found: dict[str, Any]) -> str:
    """For each precision, the worst of every metric measured, and the limit that the code has."""
    lines = ["| precision | worst measured | default limit |", "| :-- | :-- | :-- |"]
    for precision, default in DEFAULT_LIMITS.items():
        allowed = default.model_dump(exclude_none=True)
        rows = [row for row in found["rows"] if row["precision"] == precision]
        worst = []
        for metric in allowed:
            values = [row[key] for row in rows if row.get(key := metric.removesuffix("_max")) is not None]
            if not values:
                continue
            pick = min if metric.startswith("cosine") else max
            worst.append(f"{metric.removesuffix('_max')} {pick(values):.6g}")
        lines.append(f"| {precision} | {', '.join(worst) or 'not measured'} | {', '.join(f'{k} {v:g}' for k, v in allowed.items())} |")
    return "\n".join(lines) + "\n"


def matrix(found: dict[str, Any]) -> str:
    """Families × passes: `ok` where every task is, else of how many, and the reasons below. Raises ValueError where a
    cell failed or is blank: such a table is not to be published."""
    cells = {(cell["family"], cell["pass_"], cell["task"]): cell["outcome"] for cell in found["cells"]}
    families, names, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    bad = [key for key, outcome in cells.items() if outcome.startswith("FAILED")]
    bad += [(f, n, t) for f in families for n in names for t in _tasks(cells, f) if (f, n, t) not in cells]
    if bad:
        raise ValueError(
            f"matrix.json: {len(bad)} cells failed or are missing, first {' · '.join(bad[0])}; run campaigns.matrix"
        )
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "| :-- |" + " :-- |" * len(names)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for family in families:
        row = []
        for name in names:
            outcomes = [cells[family, name, task] for task in _tasks(cells, family)]
            row.append(_cell(outcomes))
            for outcome in outcomes:
                if outcome.startswith("unsupported: "):
                    # Class and family names vary within one reason.
                    reason = outcome.removeprefix("unsupported: ").splitlines()[0]
                    where = reasons.setdefault((name, _general(family, reason)), [])
                    where += [family] if family not in where else []
        lines.append(f"| {family} | {' | '.join(row)} |")
    lines += ["", f"Tasks: {', '.join(tasks)}; {len(cells)} cells.", ""]
    lines += [f"- `{name}`, {', '.join(where)}: {reason}" for (name, reason), where in reasons.items()]
    return "\n".join(lines) + "\n"


#: A transformers class in a message.
_CLASS = r"[A-Z]\w+(?:For\w+|Model)"
#: What the table itself says: which families a pass takes, and for how many products of one task's model the reason holds.
_LISTED = r"; (known|families that can be packed): .*|(?<=INT8 is for products with one matrix; )\d+ of \d+ (?=products)"


def _general(family: str, reason: str) -> str:
    """Return a reason as it holds for other families and tasks too."""
    shorter = re.sub(_LISTED, "", re.sub(r"the native encoder runs .*; got", "the native encoder does not run", reason))
    return re.sub(rf"\b({family}|{_CLASS})\b", "…", shorter)


def _cell(outcomes: Sequence[str]) -> str:
    kinds = ["unsupported" if outcome.startswith("unsupported") else outcome for outcome in outcomes]
    if len(set(kinds)) == 1:
        return kinds[0]
    return ", ".join(f"{kind} {kinds.count(kind)}/{len(kinds)}" for kind in dict.fromkeys(kinds))


def proof(found: dict[str, Any], planted: dict[str, Any], right: dict[str, Any]) -> str:
    """Outcomes of the campaigns: mutants, right models, clean runs, orders of passes."""
    examined, refused = (sum(part[what] for part in right["parts"].values()) for what in ("examinations", "refused"))
    mutants, clean = planted["findings"], found["clean_runs"]
    caught = [mutant for mutant in mutants if mutant["exit_code"]]
    lines = [
        f"- Wrong models: {len(caught)} of {len(mutants)} end the run with another exit code than 0, "
        f"{sum(mutant['expected'] in mutant['caught_by'] for mutant in caught)} by the expected check.",
        f"- Right models: {refused} of {examined:,} examinations of a stage refused, "
        f"in {len({model for part in right['parts'].values() for model in part['models']})} models.",
        f"- Clean runs: {len(clean['alarms'])} false alarms in {clean['runs']} runs "
        f"({', '.join(f'{n} stages {status}' for status, n in clean['statuses'].items())}).",
    ]
    for length, name in (("2", "pairs"), ("3", "triples")):
        counts = found["orders"][length]
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        lines.append(f"- Ordered {name} of passes: {sum(counts.values())}, of which {outcomes}.")
    lines += [f"- Exit code 0: `{mutant['name']}`. {mutant['about']} {_why(mutant)}" for mutant in mutants if not mutant["exit_code"]]
    machines = dict.fromkeys(machine(campaign["environment"]) for campaign in (found, planted))
    lines.append(f"- Measured on {'; '.join(machines)}.")
    return "\n".join(lines) + "\n"


def _why(mutant: dict[str, Any]) -> str:
    return "Its timing is void and says so." if "latency" in mutant["caught_by"] else "It is delivered."


def faults(found: dict[str, Any]) -> str:
    """Campaigns of faults: what was tried, and how often it ended as promised."""
    lines = ["| campaign | what | tried | as promised |", "| :-- | :-- | --: | --: |"]
    for name, campaign in found["campaigns"].items():
        lines += [f"| `{name}` | {what} | {tried:,} | {campaign['right'][what]:,} |" for what, tried in campaign["tried"].items()]
    slowest = {name: seconds for name, c in found["campaigns"].items() if (seconds := c["notes"].get("slowest, CPU seconds"))}
    if slowest:
        lines += ["", "Slowest fuzzed input: " + ", ".join(f"{name} {seconds:g} s" for name, seconds in slowest.items()) + " of CPU time."]
    return "\n".join(lines) + f"\n\nMeasured on {machine(found['environment'])}.\n"


def verdicts(found: dict[str, Any]) -> str:
    """A/A races: how often a model was called faster or slower than itself, and a slower one slower, for each shape."""
    rows, settings = found["rows"], found["settings"]
    lines = ["| race | shape | races | FASTER | SLOWER | NO DIFFERENCE | INCONCLUSIVE |", "| :-- | :-- |" + " --: |" * 5]
    names = {"aa": "a model against itself", "slow": f"against itself, simulated {settings['slow_down']:.0%} slower"}
    for kind, name in names.items():
        for shape in dict.fromkeys(row["shape"] for row in rows):
            counts = Counter(row["verdict"] for row in rows if (row["kind"], row["shape"]) == (kind, shape))
            told = [counts[verdict] for verdict in ("FASTER", "SLOWER", "NO DIFFERENCE", "INCONCLUSIVE")]
            cells = [name, shape.replace(" x ", "×"), *map(str, [counts.total(), *told])]
            lines.append(f"| {' | '.join(cells)} |")
    passes = settings["model"].split(" > ")[1:]
    parts = [
        f"Real MiniLM, {' > '.join(f'`{name}`' for name in passes) or 'float32'}",
        f"at most {settings['shape_budget_s']:g} s for each shape",
        f"dead band ±{settings['rule']['dead_band']:.0%}",
        machine(found["environment"]),
    ]
    disturbed = sum(bool(re.search("withheld|steal", row["warning"] or "")) for row in rows)
    return "\n".join(lines) + f"\n\n{', '.join(parts)}; {disturbed} of {len(rows)} races saw CPU steal above 3 %.\n"
