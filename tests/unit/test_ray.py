"""`bertopt.ray` under the contract of Ray's `map_batches`; `campaigns.ray_bulk` runs it on Ray itself and kills an actor."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import bertopt
from bertopt.errors import IntegrityError, UsageError
from bertopt.ray import BatchPredictor, application, predict
from bertopt.stages import signature
from tests.support.artefacts import write_artefact, write_prompted_artefact
from tests.support.tiny_models import Tiny

TEXTS = np.array([f"{'the cat sat on ' * (i % 5)}a mat {i}" for i in range(25)], object)


@pytest.fixture(scope="module")
def artefact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path_factory.mktemp("ray") / "artefact")


def test_each_row_keeps_its_columns_and_gets_its_embedding(artefact: Path) -> None:
    got = BatchPredictor(artefact)({"id": np.arange(25), "text": TEXTS})
    assert got["id"].tolist() == list(range(25)) and got["text"] is TEXTS
    np.testing.assert_allclose(got["embedding"], np.concatenate([bertopt.load(artefact)([text]) for text in TEXTS]), atol=1e-5)


def test_a_prompt_is_put_before_every_text(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_prompted_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "prompted", query="the cat: ")
    got = BatchPredictor(directory, prompt_name="query")({"text": TEXTS})
    assert got["text"] is TEXTS
    np.testing.assert_array_equal(got["embedding"], bertopt.load(directory)([f"the cat: {text}" for text in TEXTS]))


def test_pairs_and_other_tasks_get_json(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_artefact(tiny(task="text-classification"), tmp_path / "artefact")
    got = BatchPredictor(directory, "a", "b")({"a": TEXTS[:3], "b": TEXTS[3:6]})
    right = bertopt.load(directory)([*zip(TEXTS[:3].tolist(), TEXTS[3:6].tolist(), strict=True)])
    assert [json.loads(one)["label"] for one in got["answer"]] == [one["label"] for one in right]


def test_long_contexts_are_split_into_windows(tiny: Tiny, tmp_path: Path) -> None:
    directory = write_artefact(tiny(task="question-answering"), tmp_path / "artefact", "eager")
    question, context = "who sat ?", "the cat sat on a mat , " * 30
    (got,) = BatchPredictor(directory, stride=8)({"text": np.array([question], object), "text_pair": np.array([context], object)})["answer"]
    (whole,), (cut,) = (bertopt.load(directory)([(question, context)], stride=stride) for stride in (8, None))
    assert json.loads(got) == whole != cut
    with pytest.raises(UsageError, match="aggregation_strategy goes with token-classification"):
        BatchPredictor(directory, aggregation_strategy="simple")


def test_second_texts_of_the_usual_name_make_pairs(tiny: Tiny, tmp_path: Path) -> None:
    """Scored without them, a re-ranker's answers would be wrong and look right."""
    directory = write_artefact(tiny(task="text-classification"), tmp_path / "artefact")
    pairs = {"text": TEXTS[:3], "text_pair": TEXTS[3:6]}
    got, right = BatchPredictor(directory)(pairs), BatchPredictor(directory, pair="text_pair")(pairs)
    assert got["answer"].tolist() == right["answer"].tolist() != BatchPredictor(directory)({"text": TEXTS[:3]})["answer"].tolist()


def test_with_a_key_an_unsigned_artefact_is_refused(artefact: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(IntegrityError, match="is not signed"):
        BatchPredictor(artefact, key=f"{signature.new_key(tmp_path / 'release.key')}.pub")


def test_wrong_columns_are_named(artefact: Path) -> None:
    answer = BatchPredictor(artefact)
    with pytest.raises(UsageError, match="no column 'text'; they have id, title"):
        answer({"id": np.arange(2), "title": TEXTS[:2]})
    with pytest.raises(TypeError, match=r"texts\[1\]"):
        answer({"text": np.array(["a", None], object)})
    with pytest.raises(UsageError, match="have a column 'embedding' already"):
        answer({"text": TEXTS[:2], "embedding": TEXTS[:2]})


def test_actors_open_the_artefact_once_each(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray, data = ModuleType("ray"), ModuleType("ray.data")
    data.ActorPoolStrategy = lambda size: ("actors", size)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)

    class Dataset:
        def map_batches(self, fn: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
            return fn, options

    fn, options = predict(Dataset(), artefact, actors=3, threads=2, batch_rows=100, prompt_name="query", key="release.pub")
    assert options["fn_constructor_kwargs"]["prompt_name"] == "query" and Path(options["fn_constructor_kwargs"]["key"]).is_absolute()
    inspect.signature(BatchPredictor).bind(**options["fn_constructor_kwargs"])
    assert (fn, options["compute"], options["num_cpus"], options["batch_size"]) == (BatchPredictor, ("actors", 3), 2, 100)
    assert Path(options["fn_constructor_kwargs"]["directory"]).is_absolute()


def test_a_replica_serves_the_routes_of_bertopt_serve(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray Serve is given; the application itself answers here."""
    import httpx

    ray, serve, given = ModuleType("ray"), ModuleType("ray.serve"), {}

    class Deployment:
        def bind(self) -> str:
            return "application"

    def deployment(**options: Any) -> Any:
        given.update(options)
        return lambda of: Deployment()

    def ingress(build: Any) -> Any:
        given["build"] = build
        return lambda: "class"

    serve.deployment, serve.ingress, ray.serve = deployment, ingress, serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    assert application(artefact, replicas=3, threads=1, gpus=0.5) == "application"
    assert given["num_replicas"] == 3 and given["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0.5}
    app = given["build"]()

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as client:
            return await client.post("/models/artefact/embed", json={"inputs": TEXTS.tolist()})

    answer = asyncio.run(ask())
    np.testing.assert_allclose(np.array(answer.json()), bertopt.load(artefact)(TEXTS.tolist()), atol=1e-6)
