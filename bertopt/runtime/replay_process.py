"""`python -m bertopt.runtime.replay_process`: open an artefact in this new interpreter and write its outputs for fixed texts.

These are the outputs of a first call, of another thread, of concurrent calls, after an interrupted call, with more threads, beside a second
copy, and after that copy was closed; if the artefact runs a user's code, also after and beside another model that the same code rewrites.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from bertopt import stages
from bertopt.errors import BertoptError
from bertopt.passes import registry
from bertopt.runtime import monkey_patches, other_weights, replay, weight_figures
from bertopt.runtime.load import load
from bertopt.system import limits, opened_files, process_tree, temporary_directory


def _room_for_another() -> bool:
    """Return whether there is memory for another copy of this process and half as much again."""
    taken: int = psutil.Process().memory_info().rss
    available: int = psutil.virtual_memory().available
    return 1.5 * taken < min(available, limits.memory_bytes() - taken)


def _open_another(another: Path, request: dict[str, Any]) -> Any:
    """Write another model to `another` if it is not there, open it, run it, and return its predictor. Raises what the passes raise for it."""
    if not another.exists():
        other_weights.write(Path(request["directory"]), another)
    other = load(another, request["device"], request["threads"])
    replay.answers(other)
    return other


def _outcome(request: dict[str, Any], opened: set[str], another: Path) -> dict[str, Any]:
    """Return the artefact's outputs by how it was called, and what else was found; `another` is a path for another model."""
    directory, compiled = Path(request["directory"]), request["compiled"]
    # torch.compile takes minutes for each length of a single text, and concurrent calls take turns there anyway.
    foreign = stages.runs_foreign_code(stages.read_manifest(directory))
    beside, left_out = foreign and not compiled, list[str]()
    if beside:
        # Code that caches something per process may keep it from the first model, or from the last.
        try:
            _open_another(another, request)
        except Exception as error:  # a user's code, and weights that it may not take
            beside, left_out = False, [f"was not run beside another model of the same passes, which cannot be opened: {error!r}"]
        gc.collect()
    predictor: Any = load(directory, request["device"], request["threads"])
    answers = {"a new interpreter that opens the artefact": replay.answers(predictor, compiled)}
    before = weight_figures.checksums(predictor.runner.session)
    with ThreadPoolExecutor(1) as pool:
        # Servers call it from other threads.
        answers["a second call, from another thread,"] = pool.submit(replay.answers, predictor, compiled).result()
    at_once = [] if compiled else [replay.at_once(predictor), replay.calls_at_once(predictor)]
    if not compiled:
        answers["a call after one that was interrupted"] = replay.after_one_that_ends_early(predictor)
    weights, after = weight_figures.figures(predictor.runner.session), weight_figures.checksums(predictor.runner.session)
    drifted = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    changed = monkey_patches.found() if foreign else []
    if not compiled:
        more, roomy = request["more_threads"], _room_for_another() and request["device"] == "cpu"
        if beside and roomy:
            other = _open_another(another, request)
            answers["the artefact beside another model of the same passes"] = replay.answers(predictor)
            del other
        if not roomy:
            del predictor
        again = load(directory, request["device"], more)
        answers[f"the artefact on {more} threads"] = replay.answers(again)
        if roomy:
            at_once.append(replay.calls_at_once(predictor, again))
            del predictor
            gc.collect()
            answers["the artefact after another copy of it was closed"] = replay.answers(again)
    return {
        "answers": answers, "at_once": at_once, "elsewhere": [str(path) for path in opened_files.elsewhere(opened, [directory, Path.cwd()])], "weights": weights, "replaced": changed,
        "drifted": drifted, "left_out": left_out,
    }  # fmt: skip


def main() -> None:
    """Answer the request on stdin: `directory`, `device`, `threads`, `more_threads`, whether it is `compiled`, the caller's `passes` and process id, and the file to write."""
    request = json.load(sys.stdin)
    process_tree.die_with_parent(signal.SIGKILL)
    if os.getppid() != request["parent"]:  # it ended before
        sys.exit(1)
    registry.add_importable(request["passes"])
    try:
        with temporary_directory.make() as folder, opened_files.noting() as opened:
            outcome = _outcome(request, opened, Path(folder) / "other")
    except BertoptError as error:
        outcome = {"error": [type(error).__name__, str(error)]}
    Path(request["out"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
