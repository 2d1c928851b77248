"""Write the generated tables of README and docs from the result files.

    python -m benchmarks.readme [out/quickstart/report.json]

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. With a report, it is first kept as
benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import native_classifier, pipeline, roofline, serve, under_load
from benchmarks.gpu import table as gpu_table
from benchmarks.peers import tables
from benchmarks.peers.figures import BY_CALL, figures
from bertopt.checks.parity import DEFAULT_LIMITS
from bertopt.commands import recipes
from bertopt.report import formatting
from bertopt.report.terminal import markdown
from bertopt.results import Report

ROOT = Path(__file__).parent.parent
#: Pages with generated tables.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
LIMITS = ROOT / "benchmarks" / "results" / "parity_limits.json"
MATRIX = ROOT / "benchmarks" / "results" / "matrix.json"
MUTANTS = ROOT / "benchmarks" / "results" / "mutants.json"
RIGHT_MODELS = ROOT / "benchmarks" / "results" / "right_models.json"
PROOF = ROOT / "benchmarks" / "results" / "proof.json"
FAULTS = ROOT / "benchmarks" / "results" / "faults.json"
AA = ROOT / "benchmarks" / "results" / "aa.json"
UNDER_LOAD = ROOT / "benchmarks" / "results" / "under_load.json"
#: The first one's MiniLM is in the README.
CPU_PEERS = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("cpu_peers", "cpu_peers_xeon_amx", "cpu_peers_zen4", "cpu_peers_int8", "cpu_peers_avx512_vnni")]
SERVE = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("serve", "serve_own_core")]
SERVE_CAMPAIGN = ROOT / "benchmarks" / "results" / "serve_campaign.json"
RUNTIME = ROOT / "benchmarks" / "results" / "runtime_only.json"
ROOFLINE = ROOT / "benchmarks" / "results" / "roofline.json"
PIPELINE = ROOT / "benchmarks" / "results" / "pipeline.json"
GPU = ROOT / "benchmarks" / "results" / "gpu.json"
STREAM = ROOT / "benchmarks" / "results" / "stream.json"

#: README's results: the checkpoint, our artefacts, and the scenarios by the name that README gives them.
HEADLINE_MODEL, HEADLINE_OURS = "minilm", ("bertopt native int8", "bertopt native bf16")
HEADLINE = {
    "offline": "all texts at once, texts/s",
    "windows of 64": "batches of 64, texts/s",
    BY_CALL: "one short query, ms",
}
#: README's forms: the pass whose support stands for each.
FORMS = {
    "torch": "cast_half", "torch.compile": "compile_torch", "packed rows": "pack_sequences", "ONNX": "export_onnx",
    "ONNX INT8": "quantize_int8", "OpenVINO": "convert_openvino", "TensorRT": "build_tensorrt",
}  # fmt: skip


def machine(environment: dict[str, Any]) -> str:
    return f"{environment['cores']} cores of {environment['cpu']} ({', '.join(environment['isa'])})"


def section(report: Report) -> str:
    """All stages of a report, and what they were measured on."""
    packages = report.environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "onnxruntime"))
    where = f"{machine(report.environment)}, {versions}"
    return f"{markdown(report)}\nMeasured on {where}; {report.wall_s:.0f} s for the whole run.\n"


def branch(report: Report) -> str:
    """The stages from the reference to the delivered one."""
    by_name = {stage.name: stage for stage in report.stages}
    name = report.delivered.stage if report.delivered else report.stages[-1].name
    kept = {name}
    while after := by_name[name].after:
        kept.add(name := after)
    table = section(report.model_copy(update={"stages": [stage for stage in report.stages if stage.name in kept]}))
    covered = report.stage(report.delivered.stage).coverage if report.delivered else None
    ran = f" The delivered model ran at least once: {formatting.coverage(covered)}." if covered else ""
    return f"{table.rstrip()}{ran}\n"


def results(document: dict[str, Any]) -> str:
    """Our artefacts beside the fastest peer of each scenario: three rates, then fidelity."""
    race = document["models"][HEADLINE_MODEL]
    lines = [
        f"| {race['title']} | fastest peer | {' | '.join(HEADLINE_OURS)} |",
        "| :-- | :-- |" + " :-- |" * len(HEADLINE_OURS),
    ]
    peers = []
    for scenario, title in HEADLINE.items():
        rows = {row["contender"]: row for row in figures(race, scenario)}
        (peer,) = [row for row in rows.values() if row["best"]]
        peers.append(peer["contender"])
        ours = [tables.figure(rows[name], scenario) for name in HEADLINE_OURS]
        value = tables.figure(peer, scenario).removesuffix(" best peer")
        lines.append(f"| {title} | {value} ({peer['contender']}) | {' | '.join(ours)} |")
    contenders = race["contenders"]
    fidelity = [tables.accuracy(contenders[name]) for name in HEADLINE_OURS]
    theirs = "; ".join(f"{tables.accuracy(contenders[name])} ({name})" for name in dict.fromkeys(peers))
    lines.append(f"| cosine to float32: mean, least | {theirs} | {' | '.join(fidelity)} |")
    where = f"{machine(document['environment'])}, {document['settings']['threads']} threads for each contender"
    noisy = ", noisy" if race.get("warnings") else ""
    return "\n".join(lines) + f"\n\nMeasured on {where}{noisy}; × is the speed-up over the peer with its 95 % interval.\n"


def support(found: dict[str, Any]) -> str:
    """Families × forms over all tasks."""
    cells = {(cell["family"], cell["pass_"], cell["task"]): cell["outcome"] for cell in found["cells"]}
    families, tasks = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 2))
    lines = [f"| | {' | '.join(FORMS)} |", "| :-- |" + " :-- |" * len(FORMS)]
    words = {"ok": "yes", "unsupported": "no"}
    for family in families:
        row = [_cell([cells[family, name, task] for task in tasks]) for name in FORMS.values()]
        lines.append(f"| {family} | {' | '.join(words.get(cell, cell) for cell in row)} |")
    return "\n".join(lines) + "\n"


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
    bad += [(f, n, t) for f in families for n in names for t in tasks if (f, n, t) not in cells]
    if bad:
        raise ValueError(
            f"matrix.json: {len(bad)} cells failed or are missing, first {' · '.join(bad[0])}; run campaigns.matrix"
        )
    lines = [f"| | {' | '.join(f'`{name}`' for name in names)} |", "| :-- |" + " :-- |" * len(names)]
    reasons: dict[tuple[str, str], list[str]] = {}
    for family in families:
        row = []
        for name in names:
            outcomes = [cells[family, name, task] for task in tasks]
            row.append(_cell(outcomes))
            for outcome in outcomes:
                if outcome.startswith("unsupported: "):
                    # Class and family names vary within one reason.
                    reason = outcome.removeprefix("unsupported: ").splitlines()[0]
                    where = reasons.setdefault((name, re.sub(rf"\b({family}|{_CLASS})\b", "…", reason)), [])
                    where += [family] if family not in where else []
        lines.append(f"| {family} | {' | '.join(row)} |")
    lines += ["", f"Tasks: {', '.join(tasks)}; {len(cells)} cells.", ""]
    lines += [f"- `{name}`, {', '.join(where)}: {reason}" for (name, reason), where in reasons.items()]
    return "\n".join(lines) + "\n"


#: A transformers class in a message.
_CLASS = r"[A-Z]\w+(?:For\w+|Model)"


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
    lines.append(f"- Measured on {machine(found['environment'])}.")
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


def stream(found: dict[str, Any]) -> str:
    """A long stream of texts: order, memory and rate."""
    memory = found["rss_mb"]
    return (
        f"- {found['answered']:,} of {found['texts']:,} texts answered, {found['out_of_order']} out of order, at most "
        f"{found['held_at_most']:,} held at once, {found['texts_per_s']:.0f} texts/s.\n"
        f"- Largest difference of an answer to the same text alone: {found['farthest_from_alone']:g}.\n"
        f"- Resident memory: {memory['opened']:.0f} MB opened, {memory['settled']:.0f} MB settled, "
        f"{memory['highest']:.0f} MB at most.\n"
        f"- Measured on {machine(found['environment'])}.\n"
    )


def shipped() -> str:
    """The shipped recipes and their first sentences."""
    lines = ["| recipe | does |", "| :-- | :-- |"]
    lines += [f"| `{recipe.name}` | {recipe.summary} |" for recipe in recipes.shipped()]
    return "\n".join(lines) + "\n"


def layers(project: dict[str, Any]) -> str:
    """The layers that import-linter enforces, from the top down: each imports only what is below it."""
    contract = next(c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    width = max(map(len, contract["layers"])) + 2
    rule = f"+{'-' * width}+"
    return "\n".join(["```text", rule, *(f"|{floor:^{width}}|\n{rule}" for floor in contract["layers"]), "```"]) + "\n"


def cpu_peers(results: Mapping[str, dict[str, Any]]) -> str:
    """What users would run instead, beside our artefacts: tables, and a picture of each checkpoint, for each result by its file's name."""
    parts = []
    for file, found in results.items():
        raced = {name: race for name, race in found["models"].items() if race["turns"]}
        pictures = [f"![{race['title']}](benchmarks/results/{file}_{name}.svg)" for name, race in raced.items()]
        parts.append("\n".join([tables.markdown(found, file), *pictures]) + "\n")
    return "\n".join(parts)


def serving(results: Mapping[str, Any]) -> str:
    """The rates of servers, and a picture of their latencies, for each result by its file's name."""
    parts = []
    for name, found in results.items():
        where, path = found["environment"], f"benchmarks/results/{name}"
        parts.append(
            f"{serve.table(found)}\n\nMeasured on {where['cores']} cores of {where['cpu']} ({', '.join(where['isa'])}); "
            f"[raw figures]({path}.json).\n\n![99th percentile by load]({path}.svg)\n"
        )
    return "\n".join(parts)


def serve_campaign(found: Mapping[str, Any]) -> str:
    """What became of each request while a server was loaded, restarted, killed and asked for too much."""
    rows = []
    for name in ("requests", "requests_cached"):
        part = found[name]
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in part["outcomes"].items())
        rows.append((f"{part['requests']:,} requests, cache {'on' if part['cache_mb'] else 'off'}",
                     f"{outcomes}; memory grew by {part['memory_growth']:.1%}", part))  # fmt: skip
    restarts, kills, overload = (found[name] for name in ("restarts", "kills", "overload"))
    rows.append((f"{restarts['restarts']} restarts by SIGTERM under load",
                 f"{restarts['accepted']:,} accepted, {restarts['lost']} lost, {restarts['wrong']} wrong", restarts))  # fmt: skip
    rows.append((f"{kills['kills']} kills by SIGKILL under load", f"ready again in at most {max(kills['ready_s']):.2f} s", kills))
    answered = ", ".join(f"{count:,} {outcome}" for outcome, count in overload["outcomes"].items())
    rows.append((f"{overload['seconds']:g} s at 3 times capacity",
                 f"{answered}; p99 of what was accepted {overload['accepted_p99_s']:.1f} s for a bound of {overload['limit_s']:g} s of queue", overload))  # fmt: skip
    lines = ["| what | seen | holds |", "| :-- | :-- | :-- |"]
    lines += [f"| {what} | {seen} | {'yes' if part['holds'] else 'no'} |" for what, seen, part in rows]
    return "\n".join(lines) + "\n"


def gpu(found: Mapping[str, Any]) -> str:
    """What `python -m benchmarks.gpu` measured."""
    return f"Measured on {found['date']} with the code of commit {found['code']}.\n\n{gpu_table.markdown(found['parts']).rstrip()}\n"


def runtime(found: Mapping[str, Any]) -> str:
    """What running an artefact takes, in one line for each runtime."""
    parts = [
        f"`[serve,{row['runtime']}]` takes {row['installed_mb']} MB; its first answer comes {row['first_answer_s']:.1f} s after the start of "
        f"Python, {row['served_answer_s']:.1f} s after that of `bertopt serve`" for row in found["runtimes"]
    ]  # fmt: skip
    return f"{'; '.join(parts)}.\n"


def updated(text: str, root: str = "") -> str:
    """A page with every table written anew; `root` leads from the page to the repository's root."""

    def read(path: Path) -> Any:
        return json.loads(path.read_text("utf-8"))

    def report() -> Report:
        return Report.model_validate_json(RESULT.read_text("utf-8"))

    writers: dict[str, Callable[[], str]] = {
        "quickstart": lambda: branch(report()),
        "quickstart_all": lambda: section(report()),
        "results": lambda: results(read(CPU_PEERS[0])),
        "support": lambda: support(read(MATRIX)),
        "limits": lambda: limits(read(LIMITS)),
        "matrix": lambda: matrix(read(MATRIX)),
        "proof": lambda: proof(read(PROOF), read(MUTANTS), read(RIGHT_MODELS)),
        "faults": lambda: faults(read(FAULTS)),
        "aa": lambda: verdicts(read(AA)),
        "cpu_peers": lambda: cpu_peers({file.stem: read(file) for file in CPU_PEERS}),
        "under_load": lambda: f"{under_load.table(read(UNDER_LOAD))}\n",
        "roofline": lambda: roofline.table(read(ROOFLINE)),
        "pipeline": lambda: pipeline.table(read(PIPELINE)),
        "stream": lambda: stream(read(STREAM)),
        "serve": lambda: serving({file.stem: read(file) for file in SERVE}),
        "serve_campaign": lambda: serve_campaign(read(SERVE_CAMPAIGN)),
        "native_classifier": lambda: native_classifier.table(read(native_classifier.RESULT)),
        "gpu": lambda: gpu(read(GPU)),
        "runtime": lambda: runtime(read(RUNTIME)),
        "recipes": shipped,
        "layers": lambda: layers(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))),
    }
    for name, table in writers.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin not in text:
            continue
        written = table().replace("](benchmarks/", f"]({root}benchmarks/")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{written}{end}{rest.split(end)[1]}"
    return text


def pages() -> dict[Path, str]:
    """Every page with its tables written anew."""
    return {
        page: updated(page.read_text("utf-8"), "../" * (len(page.relative_to(ROOT).parts) - 1)) for page in PAGES
    }


def main() -> None:
    if len(sys.argv) > 1:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(Path(sys.argv[1]).read_text("utf-8"), "utf-8")
    for page, text in pages().items():
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
