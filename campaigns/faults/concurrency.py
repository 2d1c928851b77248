"""Run at the same time what shares something: `python -m campaigns.faults.concurrency [--times 25]`.

Eight exports at once into one output, `times` rounds: every stage must be built once, and all must deliver the same
artefact. Then 8 threads × 40 × `times` calls of one predictor, for eager, ONNX and OpenVINO: equal to the last bit to calls
of one thread, and to another load. Not looked at: exports that start Python at the same time (they are forked).
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from campaigns.faults import exports, forked, outcome

PROCESSES, THREADS, CALLS = 8, 8, 40
TEXTS = ["the cat sat on the mat", "a dog", "a very good film , not bad !", "cat " * 40, ""]
#: The stage of each form, all of one export.
FORMS = {"eager": "use_sdpa", "ONNX": "export_onnx", "OpenVINO": "convert_openvino"}
STEPS = [{"pass": "use_sdpa"}, {"pass": "export_onnx", "after": "reference"}, {"pass": "convert_openvino"}]


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Run `times` rounds of exports, then the threads."""
    forked.prepare()
    result, recipe = outcome.Outcome(), exports.recipe_in(scratch)
    delivered: set[str] = set()
    for number in outcome.in_time(range(times)):
        out = scratch / f"out-{number}"
        said = [scratch / f"said-{place}" for place in range(PROCESSES)]
        running = [forked.start(recipe, out, scratch, file) for file in said]
        for process, file in zip(running, said, strict=True):
            result.count("exports at once end with 0", exports.judged(process.wait(3600), file.read_text("utf-8", "replace"), (0,)))
        delivered.add(_content(out))
        built = [path.name.rpartition("-")[0] for path in (out / "stages").iterdir()]
        result.count("one directory for each stage", None if len(built) == len(set(built)) == 5 else f"{sorted(built)}")
    result.count("all rounds deliver one artefact", None if len(delivered) == 1 else f"{len(delivered)} artefacts")
    # Before threads start, which a fork would not have.
    forms, problem = _forms(recipe.parent / "tiny", scratch)
    for form, stage in FORMS.items():
        for differs in _threads(next(forms.glob(f"{stage}-*")), CALLS * times) if problem is None else [problem]:
            result.count(f"calls of {THREADS} threads, {form}", differs)
    return result


def _content(out: Path) -> str:
    from bertopt.stages import read_manifest

    return read_manifest(out / "artifact").content_sha256


def _forms(model: Path, scratch: Path) -> tuple[Path, str | None]:
    """Export a stage of each form; return the directory of the stages, and what went wrong."""
    recipe, out, said = scratch / "forms.json", scratch / "forms", scratch / "said"
    recipe.write_text(json.dumps({"schema_version": 1, "model": str(model), "device": "cpu", "inputs": {"shapes": [[2, 8]]}, "steps": STEPS}))
    code = forked.start(recipe, out, scratch, said).wait()
    return out / "stages", f"exit {code}: {said.read_text('utf-8', 'replace')[-300:]}" if code else None


def _threads(stage: Path, calls: int) -> list[str | None]:
    """Whether each of `calls` calls by each thread, of one text or several, answers as a call alone."""
    from bertopt.runtime.load import load

    predictor, other = load(stage), load(stage)
    asked = [[text] for text in TEXTS] + [TEXTS[:2], TEXTS]
    expected = [predictor.logits(texts) for texts in asked]

    def call(number: int) -> str | None:
        which = number % len(asked)
        return None if np.array_equal(predictor.logits(asked[which]), expected[which]) else f"call {number} differs"

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(call, range(THREADS * calls)))
    same = all(np.array_equal(other.logits(texts), want) for texts, want in zip(asked, expected, strict=True))
    return [*answers, None if same else "another load answers otherwise"]


if __name__ == "__main__":
    sys.exit(outcome.main("concurrency", __doc__ or "", run, 25))
