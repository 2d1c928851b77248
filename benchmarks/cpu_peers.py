"""This project's artefacts beside what users would run instead, on this machine's CPU.

    python -m benchmarks.cpu_peers --prepare --model minilm,base12      environments, checkpoints, everyone's models
    python -m benchmarks.cpu_peers --model minilm --seconds 480         at most so long, but for the first round
    python -m benchmarks.cpu_peers --model minilm --ours fastest=out/cpu_fastest/artifact --all
    python -m benchmarks.cpu_peers --quick                              a few minutes, to see whether everything works

The native encoder's INT8 and bf16, made by build_native, always race; --ours adds artefacts. Peers are the fastest way of
each library and the near-lossless ones (--all: every one; of large models the INT8 ones). Their environments and models are
built once under --peers (several GB). Each contender is a separate process on the same cores, stopped while another is
timed; then each is opened again on one thread, whose CPU time is counted. Run again, it goes on where it was, model by
model; --fresh forgets. Writes the result, a Markdown table and a picture of each checkpoint; python -m benchmarks.readme puts
the tables into README and docs.

Memory is the peak of the process, libraries included; load is importing and opening, with files that may be in the system's
cache. Inductor compiles in that time, which takes a minute or more. llama.cpp is built from source, with a C++ compiler.
Exit codes: 0, 2 for wrong usage or missing data, 4 where a contender that this CPU could run did not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.peers import models, race, roster, tables
from benchmarks.peers.contender import ContenderError, decoded
from benchmarks.peers.environments import BuildError
from bertopt.errors import BertoptError
from bertopt.pipeline.progress import ProgressCallback
from bertopt.system import atomic_write, environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cpu_peers.json"
DATA = Path("data") / "debian-sections"
MISSING = "not on this CPU"


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", "--models", dest="models", default="minilm", help=f"of {', '.join(models.CHECKPOINTS)}, with commas (default: minilm)")
    add("--ours", action="append", default=[], metavar="[MODEL:]NAME=DIR", help="an artefact; MODEL defaults to minilm")
    add("--only", action="append", default=[], metavar="CONTENDER", help="leave all others out; repeatable")
    add("--rounds", type=int, default=6)
    add("--seconds", type=float, default=540.0, help="for each checkpoint, opening included; a round that has begun ends")
    add("--threads", type=int, default=2)
    add("--streams", type=int, default=0, help="for artefacts; 0 lets them choose")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one request")
    add("--peers", type=Path, default=ROOT / ".peers", help="where environments are kept")
    add("--shared", type=Path, default=ROOT.parent / "shared", help="the folder of checkpoints and data")
    add("--out", type=Path, help=f"result file (default: {RESULT.relative_to(ROOT)})")
    add("--all", action="store_true", help="race the slower peers too")
    add("--isa", choices=("avx512_vnni",), help="mask what is beyond it from the native encoder, not from peers")
    add("--quick", action="store_true", help="an eighth of the texts, 2 rounds, to out/cpu_peers.json")
    add("--prepare", action="store_true", help="build what is missing and stop")
    add("--fresh", action="store_true", help="forget an earlier result")
    found = parser.parse_args(words)
    found.models = found.models.split(",")
    for name in found.models:
        if name not in models.CHECKPOINTS:
            parser.error(f"--models must be of {', '.join(models.CHECKPOINTS)}; got '{name}'")
    if min(found.rounds, found.threads) < 1 or found.threads > len(os.sched_getaffinity(0)):
        parser.error(f"--rounds must be positive and --threads 1 to {len(os.sched_getaffinity(0))}")
    found.rounds = min(found.rounds, 2) if found.quick else found.rounds
    default = ROOT / "out" / RESULT.name if found.quick else RESULT
    found.out = found.out or (default.with_stem(f"{RESULT.stem}_{found.isa}") if found.isa else default)
    return found


def artefacts(words: Sequence[str], checkpoint: models.Checkpoint) -> list[roster.Entry]:
    """The ones for a checkpoint. Raises ValueError, FileNotFoundError."""
    found = []
    for word in words:
        name, equals, directory = word.partition("=")
        if not (name and equals and directory):
            raise ValueError(f"--ours must be [MODEL:]NAME=DIR; got '{word}'")
        model, _, name = name.rpartition(":")
        if (model or "minilm") not in models.CHECKPOINTS:
            raise ValueError(f"--ours: expected a model of {', '.join(models.CHECKPOINTS)}; got '{model}'")
        if (model or "minilm") == checkpoint.name:
            found.append(roster.ours(f"bertopt {name}", Path(directory), checkpoint.kind))
    return found


def document(options: argparse.Namespace) -> dict[str, Any]:
    """The result to add to. Raises ValueError where the one there is of other settings or another machine."""
    new = {
        "environment": environment.describe(), "models": {},
        "settings": {"threads": options.threads, "streams": options.streams, "quick": options.quick, "isa": options.isa},
    }  # fmt: skip
    if options.fresh or not options.out.is_file():
        return new
    old: dict[str, Any] = json.loads(options.out.read_text("utf-8"))
    if any(old[key] != new[key] for key in ("environment", "settings")):
        raise ValueError(f"{options.out} was measured with other settings or elsewhere; give --fresh or another --out")
    return old


def expected(reference: roster.Ready, folder: Path, job: race.Job) -> Any:
    """What the float32 reference answers to the natural texts, computed once. Raises ContenderError."""
    path = folder / "reference.json"
    key = {"identity": reference.identity, "texts": job.texts["natural"]}
    if path.is_file() and (kept := json.loads(path.read_text("utf-8")))["key"] == key:
        return decoded(kept["answers"])
    with race.start(reference, folder, job) as contender:
        answers = contender.ask("answers", name="natural")
    path.write_text(json.dumps({"key": key, "answers": answers}), "utf-8")
    return decoded(answers)


def prepared(
    checkpoint: models.Checkpoint, options: argparse.Namespace, race_: dict[str, Any], on_progress: ProgressCallback
) -> tuple[list[roster.Ready], roster.Ready, Path]:
    """Everyone that can run here, the reference, and the checkpoint's directory; who cannot is noted in `race_`."""
    source = models.source_of(checkpoint.name, options.peers, options.shared)
    made_of = models.source_of(checkpoint.same_as or checkpoint.name, options.peers, options.shared)
    texts = roster.calibration(models.existing(options.shared / DATA / "train.jsonl"), options.peers)
    common = {
        "threads": options.threads, "streams": options.streams, "max_length": models.max_length(source),
        "cores": sorted(os.sched_getaffinity(0))[: options.threads],
    }  # fmt: skip
    isa, found = environment.describe()["isa"], []
    entries = roster.wanted(checkpoint, artefacts(options.ours, checkpoint), options.only, options.all)
    reference = roster.reference(checkpoint.kind)
    for entry in entries:
        if entry.needs and not set(entry.needs) & set(isa):
            race_["contenders"][entry.name] = {"peer": entry.peer, "failed": MISSING}
            continue
        on_progress(f"preparing {entry.name}")
        try:
            # Ours are artefacts that cut texts off where the checkpoint does; peers get the length when they load.
            of = made_of if entry.peer else source
            found.append(roster.ready(entry, checkpoint, of, options.peers, texts, common))
        except BuildError as error:
            race_["contenders"][entry.name] = {"peer": entry.peer, "failed": error.reason}
            on_progress(str(error))
    return found, roster.ready(reference, checkpoint, made_of, options.peers, texts, common), source


def run(checkpoint: models.Checkpoint, options: argparse.Namespace, result: dict[str, Any], console: Console) -> None:
    """Race one checkpoint and add it to the result file."""

    def on_progress(words: str | None) -> None:
        console.print(
            f"{time.strftime('%H:%M:%S')} {checkpoint.name}: {words}", highlight=False, markup=False, soft_wrap=True
        )

    race_ = result["models"].setdefault(checkpoint.name, {"contenders": {}, "turns": []})
    began = time.monotonic()
    ready, reference, source = prepared(checkpoint, options, race_, on_progress)
    length = models.max_length(source)
    natural, truth = models.read(options.shared / DATA / "validation.jsonl", 64 if options.quick else models.TEXTS)
    scenarios = checkpoint.scenarios(options.quick, length)
    texts = {
        "natural": natural[: max(32, models.TEXTS // checkpoint.work)],
        "short": models.cut(source, natural, models.SHORT, min(64, len(natural))),
        "flat": models.cut(
            source, natural, checkpoint.flat(length), max(s.count for s in scenarios if s.texts == "flat")
        ),
    }

    def job(one_thread: bool, seconds: float) -> race.Job:
        chosen = [scenario for scenario in scenarios if scenario.one_thread == one_thread]
        return race.Job(chosen, texts, truth[: len(texts["natural"])], options.rounds, seconds, options.timeout)

    race_.update(
        title=checkpoint.title, labelled=checkpoint.labelled, max_length=length, texts=len(texts["natural"]),
        scenarios=[vars(scenario) for scenario in scenarios],
    )  # fmt: skip
    folder = options.peers / "models" / checkpoint.name
    folder.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        atomic_write.write(options.out, json.dumps(result, indent=1) + "\n")

    answers = expected(reference, folder, job(False, 0))
    if options.prepare:
        on_progress("ready")
        return
    alone = [scenario for scenario in scenarios if scenario.one_thread]
    race.race(race_, ready, answers, job(False, options.seconds * (0.75 if alone else 1)), folder, save, on_progress)
    if alone:
        on_progress("on one thread")
        one_core = [one.on_one_thread() for one in ready if "failed" not in race_["contenders"][one.entry.name]]
        race.race(race_, one_core, None, job(True, options.seconds - (time.monotonic() - began)), folder, save, on_progress)
    svg = options.out.with_name(f"{options.out.stem}_{checkpoint.name}.svg")
    svg.write_text(tables.picture(race_), "utf-8")


def main(words: Sequence[str] | None = None) -> int:
    options = parsed(words)
    console = Console(stderr=True)
    began = time.monotonic()
    if options.isa:
        os.environ["BERTOPT_NATIVE_ISA"] = options.isa  # contenders inherit it
    try:
        result = document(options)
        for name in options.models:
            run(models.CHECKPOINTS[name], options, result, console)
    except (ValueError, FileNotFoundError, BertoptError) as error:
        console.print(f"cpu_peers: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    except (ContenderError, BuildError) as error:
        console.print(
            f"cpu_peers: the reference could not be run: {error}", highlight=False, markup=False, soft_wrap=True
        )
        return 4
    if options.prepare:
        return 0
    table = tables.markdown(result, options.out.stem)
    options.out.with_suffix(".md").write_text(table.replace("(benchmarks/results/", "("), "utf-8")  # links from there
    print(table)
    console.print(f"{time.monotonic() - began:.0f} s; {options.out}", highlight=False, soft_wrap=True)
    contenders = [c for name in options.models for c in result["models"][name]["contenders"].values()]
    return 4 if any(c.get("failed", MISSING) != MISSING for c in contenders) else 0


if __name__ == "__main__":
    sys.exit(main())
