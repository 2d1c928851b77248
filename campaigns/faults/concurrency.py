"""Run at the same time what shares something: `python -m campaigns.faults.concurrency [--times 25]`.

Eight exports at once into one output, `times` rounds: every stage must be built once, and all must deliver the same
artefact. Then 8 threads × 40 × `times` calls of one predictor, for eager, ONNX and OpenVINO: equal to the last bit to calls
of one thread, and to another load.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from campaigns.faults import exports, outcome

PROCESSES, THREADS, CALLS = 8, 8, 40
TEXTS = ["the cat sat on the mat", "a dog", "a very good film , not bad !", "cat " * 40, ""]
FORMS = {
    "eager": [{"pass": "use_sdpa"}], "ONNX": [{"pass": "export_onnx"}],
    "OpenVINO": [{"pass": "export_onnx"}, {"pass": "convert_openvino"}],
}  # fmt: skip


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Run `times` rounds of exports, then the threads."""
    result, recipe = outcome.Outcome(), exports.recipe_in(scratch)
    delivered: set[str] = set()
    for number in outcome.in_time(range(times)):
        out = scratch / f"out-{number}"
        running = [exports.start(recipe, out) for _ in range(PROCESSES)]
        for process in running:
            result.count("exports at once end with 0", exports.judged(*exports.ended(process, 3600), (0,)))
        delivered.add(_content(out))
        built = [path.name.rpartition("-")[0] for path in (out / "stages").iterdir()]
        result.count("one directory for each stage", None if len(built) == len(set(built)) == 5 else f"{sorted(built)}")
    result.count("all rounds deliver one artefact", None if len(delivered) == 1 else f"{len(delivered)} artefacts")
    for form, steps in FORMS.items():
        for problem in _threads(form, steps, recipe.parent / "tiny", scratch, CALLS * times):
            result.count(f"calls of {THREADS} threads, {form}", problem)
    return result


def _content(out: Path) -> str:
    from bertopt.stages import read_manifest

    return read_manifest(out / "artifact").content_sha256


def _threads(form: str, steps: list[dict[str, str]], model: Path, scratch: Path, calls: int) -> list[str | None]:
    """Whether each of `calls` calls by each thread, of one text or several, answers as a call alone."""
    from bertopt.runtime.load import load

    recipe = {"schema_version": 1, "model": str(model), "device": "cpu", "inputs": {"shapes": [[2, 8]]}, "steps": steps}
    (scratch / f"{form}.yaml").write_text(json.dumps(recipe))
    code, said = exports.ended(exports.start(scratch / f"{form}.yaml", scratch / form))
    if code:
        return [f"exit {code}: {said[-300:]}"]
    predictor, other = load(scratch / form / "artifact"), load(scratch / form / "artifact")
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
