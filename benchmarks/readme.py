"""Write the generated tables of README and docs from the result files.

    python -m benchmarks.readme [out/quickstart/report.json]

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`. With a report, it is first kept as
benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import campaign_tables, native_classifier, pipeline, roofline, serve, under_load
from benchmarks.campaign_tables import machine
from benchmarks.gpu import table as gpu_table
from benchmarks.peers import tables
from benchmarks.peers.figures import BY_CALL, figures
from bertopt.commands import recipes
from bertopt.report import formatting
from bertopt.report.terminal import markdown
from bertopt.results import Report

ROOT = Path(__file__).parent.parent
#: Pages with generated tables.
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULT = ROOT / "benchmarks" / "results" / "quickstart.json"
LIMITS = ROOT / "benchmarks" / "results" / "parity_limits.json"
#: The second has the families that came later, the third reduced precision once cells were held to their twins; then what came later still.
MATRICES = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("matrix", "matrix_rotary", "matrix_reduced", "matrix_native", "matrix_sparse", "matrix_more")]
MUTANTS = ROOT / "benchmarks" / "results" / "mutants.json"
RIGHT_MODELS = ROOT / "benchmarks" / "results" / "right_models.json"
PROOF = ROOT / "benchmarks" / "results" / "proof.json"
FAULTS = ROOT / "benchmarks" / "results" / "faults.json"
AA = ROOT / "benchmarks" / "results" / "aa.json"
UNDER_LOAD = ROOT / "benchmarks" / "results" / "under_load.json"
#: The first one's MiniLM is in the README.
CPU_PEERS = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("cpu_peers", "cpu_peers_xeon_amx", "cpu_peers_zen4", "cpu_peers_int8", "cpu_peers_avx512_vnni", "cpu_peers_zen3", "cpu_peers_splade")]
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
        path = f"benchmarks/results/{name}"
        parts.append(
            f"{serve.table(found)}\n\nMeasured on {machine(found['environment'])}; "
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

    def cells() -> dict[str, Any]:
        return {"cells": [cell for path in MATRICES for cell in read(path)["cells"]]}

    def report() -> Report:
        return Report.model_validate_json(RESULT.read_text("utf-8"))

    writers: dict[str, Callable[[], str]] = {
        "quickstart": lambda: branch(report()),
        "quickstart_all": lambda: section(report()),
        "results": lambda: results(read(CPU_PEERS[0])),
        "support": lambda: campaign_tables.support(cells()),
        "limits": lambda: campaign_tables.limits(read(LIMITS)),
        "matrix": lambda: campaign_tables.matrix(cells()),
        "proof": lambda: campaign_tables.proof(read(PROOF), read(MUTANTS), read(RIGHT_MODELS)),
        "faults": lambda: campaign_tables.faults(read(FAULTS)),
        "aa": lambda: campaign_tables.verdicts(read(AA)),
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
