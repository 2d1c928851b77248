"""Init: the recipe it writes is accepted unchanged, and says where each value comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertopt.commands import init as module
from bertopt.commands.init import init
from bertopt.errors import UsageError
from bertopt.recipe.parser import load
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, TASKS, Tiny


@pytest.mark.parametrize(("family", "task"), [*((family, "fill-mask") for family in (*FAMILIES, *OTHER_FAMILIES, *NORM_FIRST_FAMILIES)), *(("bert", task) for task in TASKS)])  # fmt: skip
def test_the_recipe_is_accepted_unchanged(family: str, task: str, tiny: Tiny, tmp_path: Path) -> None:
    path = init(str(tiny(family, task)), tmp_path / "r.yaml", "cpu")
    recipe = load(path)
    assert (recipe.model, recipe.task, recipe.device) == (str(tiny(family, task)), task, "cpu")
    assert recipe.inputs.shapes == ((1, 16), (1, 64), (8, 64)) and recipe.deliver == "fastest"
    head = path.read_text().splitlines()
    assert head[0] == f"# {family}, 2 layers, hidden size 32, texts up to 64 tokens."
    assert sum("#" in line for line in head) > 8


def test_a_revision_of_the_hub_is_written(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resolve", lambda model, revision: tiny())
    assert load(init("org/name", tmp_path / "r.yaml", "cpu", revision="1e3")).revision == "1e3"
    assert load(init("org/name", tmp_path / "other.yaml", "cpu")).revision is None


@pytest.mark.parametrize("keep", ["exact", "near-lossless", "fast"])
def test_the_steps_are_those_of_the_shipped_recipe(keep: Any, tiny: Tiny, tmp_path: Path) -> None:
    from bertopt.commands.optimize import plan

    written, planned = load(init(str(tiny()), tmp_path / "r.yaml", "cpu", keep)), plan(str(tiny()), "cpu", keep).recipe
    assert (written.steps, written.limits, written.deliver) == (planned.steps, planned.limits, planned.deliver)


def test_shapes_follow_the_texts(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "größe 😀.txt"
    # With [CLS] and [SEP]: 3, 3, 3 and 30 tokens.
    texts.write_text("cat\ndog\nmat\n" + " ".join(["cat"] * 28) + "\n")
    recipe = load(init(str(tiny()), tmp_path / "r.yaml", "cpu", texts=texts))
    assert recipe.inputs.shapes == ((1, 8), (1, 32), (8, 32)) and recipe.inputs.texts == str(texts)


def test_shapes_of_a_classifier_follow_its_pairs(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "pairs.jsonl"
    texts.write_text(json.dumps({"text": "cat " * 4, "text_pair": "dog " * 17}) + "\n")
    assert load(init(str(tiny()), tmp_path / "r.yaml", "cpu", texts=texts)).inputs.shapes == ((1, 24), (8, 24))
    embeddings = load(init(str(tiny("bert", "feature-extraction", "mean")), tmp_path / "e.yaml", "cpu", texts=texts))
    assert embeddings.inputs.shapes == ((1, 8), (1, 24), (8, 24))


def test_a_sentence_transformers_model(tiny: Tiny, tmp_path: Path) -> None:
    assert load(init(str(tiny("bert", "feature-extraction", "mean")), tmp_path / "r.yaml")).task == "feature-extraction"


def test_an_architecture_that_tells_no_task(tiny: Tiny, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    for architectures in (["Evil\n- pass: x"], None, "text", []):
        (model / "config.json").write_text(json.dumps(config | {"architectures": architectures}))
        out = tmp_path / "r.yaml"
        out.unlink(missing_ok=True)
        assert load(init(str(model), out, "cpu")).task == "auto"


def test_nothing_is_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists; give another name"):
        init(str(tiny()), tmp_path / "r.yaml")
    assert (tmp_path / "r.yaml").read_text() == "mine"
    with pytest.raises(UsageError, match="cannot be written"):
        init(str(tiny()), tmp_path / "none" / "r.yaml")
