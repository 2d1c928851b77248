"""Another model for the passes of an artefact: the same values in another order, which opens and answers otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import bertopt
from bertopt import stages
from bertopt.modeling import checkpoint
from bertopt.runtime import other_weights
from tests.support.tiny_models import Tiny, add_dense


def test_it_opens_and_answers_otherwise(tiny: Tiny, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny("bert", "feature-extraction", "mean"), tmp_path / "source"))
    model = checkpoint.load(str(add_dense(source, (16, "Tanh"))))
    made, other = tmp_path / "made", tmp_path / "other"
    made.mkdir()
    checkpoint.write_snapshot(model, made)
    stages.write_form(model, made)
    stages.write_manifest(made, stages.describe(model))
    other_weights.write(made, other)
    files = [{str(path.relative_to(folder)) for path in stages.files_of(folder)} for folder in (made, other)]
    assert files[0] == files[1]
    one, two = (bertopt.load(folder)(["the cat sat on the mat"]) for folder in (made, other))
    assert one.shape == two.shape and np.isfinite(two).all() and float((one * two).sum()) < 0.99
    differ = [name for name in files[0] if (made / name).read_bytes() != (other / name).read_bytes()]
    assert {Path(name).suffix for name in differ} == {".safetensors", ".json"} and len(differ) == 3, "weights of both files, and the manifest"
