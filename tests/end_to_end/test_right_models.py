"""The campaign of right models: its models and what its variants change. All of them: `python -m campaigns.right_models`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from bertopt.modeling import families
from campaigns import right_models
from campaigns.examination import examine
from tests.support import example_passes
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import CLASSES, HEADS, Tiny

assert example_passes.SwapLabels.name() == "swap_labels"


@pytest.fixture(scope="module")
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers() as shared:
        yield shared


def test_two_checkpoints_and_tiny_ones_of_each_family_and_task_are_models(tmp_path: Path) -> None:
    names = [name for name, _ in right_models.models([Path("a"), Path("b")], 1, tmp_path)]
    of_checkpoints = {f"{source} {variant.__name__}" for source in "ab" for variant in right_models.VARIANTS}
    # Of every family that bertopt takes, each task that transformers has a class for.
    tiny = {f"tiny {family} {task} 0" for family in CLASSES for task, head in HEADS.items() if hasattr(transformers, CLASSES[family] + head)}
    assert set(names) == of_checkpoints | tiny and len(set(names)) == len(names)


def test_every_family_has_tiny_models() -> None:
    # CamemBERT is RoBERTa under another name.
    assert set(CLASSES) == {*families.FAMILIES} - {"camembert"}


def test_a_wrong_stage_is_refused_and_a_right_one_is_not(workers: SharedWorkers, tiny: Tiny, tmp_path: Path) -> None:
    steps = [{"pass": "use_sdpa", "on_fail": "skip"}, {"pass": "swap_labels", "on_fail": "skip"}]
    recipe = {"schema_version": 1, "model": str(tiny()), "device": "cpu", "inputs": {"shapes": [[1, 8]]}, "steps": steps}
    right, wrong = examine(recipe, tmp_path / "out", workers, 2, 1, [["the cat sat", "a dog"]])
    assert (right.name, right.pairs, right.refused) == ("use_sdpa", 2, {})
    assert set(wrong.refused) == {0, 1} and "must be at most" in wrong.refused[0]


def test_a_second_run_goes_on_behind_the_first(
    workers: SharedWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["right_models", "--tiny", "1", "--only", "tiny bert text-classification", "--steps", "use_sdpa", "--seeds", "1", "--sweeps", "1",
             "--draws", "1", "--out", str(tmp_path / "found.jsonl")]  # fmt: skip
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(right_models, "Workers", lambda: workers)
    assert right_models.main() == 0
    assert "0 of 1 refused" in capsys.readouterr().out
    (found,) = (tmp_path / "found.jsonl").read_text().splitlines()
    assert right_models.main() == 0
    assert "0 of 1 refused, as" in capsys.readouterr().out and (tmp_path / "found.jsonl").read_text().splitlines() == [found]
    other = {**json.loads(found), "how": {**json.loads(found)["how"], "source": "other code"}}
    (tmp_path / "found.jsonl").write_text(json.dumps(other) + "\n")
    assert right_models.main() == 0
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("variant", right_models.VARIANTS, ids=lambda variant: variant.__name__)
def test_a_variant_is_a_checkpoint_that_loads(tiny: Tiny, tmp_path: Path, variant: Any) -> None:
    from bertopt.modeling import checkpoint

    out = right_models.write(tiny(), tmp_path / "model", variant, seed=1)
    loaded = checkpoint.load(str(out), "text-classification", None)
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert loaded.spec.layers == layers == (1 if variant is right_models.fewer_layers else 2)
    same = (out / "model.safetensors").read_bytes() == (tiny() / "model.safetensors").read_bytes()
    assert not same or variant is right_models.as_it_is
