"""`bertopt.ray` under the contract of Ray's `map_batches`; `campaigns.ray_bulk` runs it on Ray itself and kills an actor."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt.errors import UsageError
from bertopt.ray import BatchPredictor, predict
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

TEXTS = np.array([f"{'the cat sat on ' * (i % 5)}a mat {i}" for i in range(25)], object)


@pytest.fixture(scope="module")
def artefact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path_factory.mktemp("ray") / "artefact")


def test_each_row_keeps_its_columns_and_gets_its_embedding(artefact: Path) -> None:
    got = BatchPredictor(artefact)({"id": np.arange(25), "text": TEXTS})
    assert got["id"].tolist() == list(range(25)) and got["text"] is TEXTS
    np.testing.assert_allclose(got["embedding"], np.concatenate([bertopt.load(artefact)([text]) for text in TEXTS]), atol=1e-5)


def test_pairs_and_other_tasks_get_json(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_artefact(tiny(task="text-classification"), tmp_path / "artefact")
    got = BatchPredictor(directory, "a", "b")({"a": TEXTS[:3], "b": TEXTS[3:6]})
    right = bertopt.load(directory)([*zip(TEXTS[:3].tolist(), TEXTS[3:6].tolist(), strict=True)])
    assert [json.loads(one)["label"] for one in got["answer"]] == [one["label"] for one in right]


def test_wrong_columns_are_named(artefact: Path) -> None:
    answer = BatchPredictor(artefact)
    with pytest.raises(UsageError, match="no column 'text'; they have id, title"):
        answer({"id": np.arange(2), "title": TEXTS[:2]})
    with pytest.raises(TypeError, match=r"texts\[1\]"):
        answer({"text": np.array(["a", None], object)})


def test_actors_open_the_artefact_once_each(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, data = ModuleType("ray"), ModuleType("ray.data")
    data.ActorPoolStrategy = lambda size: ("actors", size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)

    class Dataset:
        def map_batches(self, fn: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
            return fn, options

    fn, options = predict(Dataset(), artefact, actors=3, threads=2, batch_rows=100)
    inspect.signature(BatchPredictor).bind(**options["fn_constructor_kwargs"])
    assert (fn, options["compute"], options["num_cpus"], options["batch_size"]) == (BatchPredictor, ("actors", 3), 2, 100)
    assert Path(options["fn_constructor_kwargs"]["directory"]).is_absolute()
