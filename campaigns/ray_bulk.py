"""`bertopt.ray` on Ray itself: an actor is killed in the middle, and each row must come out once with its own answer.

    python -m campaigns.ray_bulk [--artifact DIR] [--rows 100000] [--actors 2] [--out FILE]

Without `--artifact` it runs a tiny random embedding model. The first actor to begin its second batch ends itself with SIGKILL.
Each answer is compared with that of `bertopt.load` on the text alone. Exits 1 where a row is lost, doubled or wrong.

What it does not look at: a machine that is lost with its blocks, and writing the result to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import bertopt
from bertopt import ray as bertopt_ray

POOL = 500
LIMIT = 1e-5


class KilledOnce(bertopt_ray.BatchPredictor):
    """Ends its process with SIGKILL at its second batch, if no other actor has done so: `BERTOPT_KILLED` names the mark."""

    _calls = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        if self._calls == 2:
            try:
                os.close(os.open(os.environ["BERTOPT_KILLED"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def run(artifact: Path, rows: int, actors: int, mark: Path) -> dict[str, Any]:
    import ray

    rng = random.Random(11)
    predictor = bertopt.load(artifact, threads=1)
    words = sorted(word for word in predictor.tokenizer.fast.get_vocab() if word.isalpha())
    texts = [" ".join(rng.choices(words, k=min(100, int(rng.lognormvariate(2.5, 0.8)) + 3))) for _ in range(POOL)]
    right = np.concatenate([predictor([text]) for text in texts])
    numbers = [rng.randrange(POOL) for _ in range(rows)]
    bertopt_ray.BatchPredictor = KilledOnce  # type: ignore[misc]
    here = str(Path(__file__).parents[1])
    ray.init(
        num_cpus=actors + 1, include_dashboard=False, log_to_driver=False, object_store_memory=512 * 2**20,
        runtime_env={"env_vars": {"BERTOPT_KILLED": str(mark), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([here, *sys.path])}},
    )  # fmt: skip
    start = time.monotonic()
    try:
        dataset = ray.data.from_items([{"row": row, "known": number, "text": texts[number]} for row, number in enumerate(numbers)])
        seen: Counter[int] = Counter()
        wrong, worst = 0, 0.0
        for batch in bertopt_ray.predict(dataset, artifact, actors=actors).iter_batches(batch_size=4096, batch_format="numpy"):
            seen.update(batch["row"].tolist())
            errors = np.abs(np.stack(list(batch["embedding"])) - right[batch["known"]]).max(1)
            # NaN is wrong too.
            wrong += int((~(errors <= LIMIT)).sum()) + sum(numbers[row] != known for row, known in zip(batch["row"].tolist(), batch["known"].tolist(), strict=True))
            worst = max(worst, float(errors.max()))
    finally:
        ray.shutdown()
    lost, doubled = len(set(range(rows)) - seen.keys()), sum(count > 1 for count in seen.values())
    killed = mark.exists()
    return {"rows": rows, "actors": actors, "ray": ray.__version__, "killed": int(killed), "lost": lost, "doubled": doubled, "wrong": wrong,
            "largest_error": worst, "limit": LIMIT, "seconds": round(time.monotonic() - start, 1),
            "holds": killed and not (lost or doubled or wrong)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ray_bulk.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bertopt-ray-") as name:
        folder, artifact = Path(name), arguments.artifact
        if artifact is None:
            from tests.support.artefacts import write_artefact
            from tests.support.tiny_models import write_tiny

            write_tiny(folder / "tiny", task="feature-extraction", pooling="mean")
            artifact = write_artefact(folder / "tiny", folder / "artifact")
        result = run(artifact, arguments.rows, arguments.actors, folder / "killed")
        result = {"artefact": "tiny random model, ONNX float32" if arguments.artifact is None else artifact.name, **result}
    print(json.dumps(result))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if not result["holds"]:
        sys.exit("does not hold: each row must come out once and right, although an actor was killed")


if __name__ == "__main__":
    main()
