"""The campaign of right models: its models and what its variants change. All of them: `python -m campaigns.right_models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertopt.workers.client import Workers
from campaigns import right_models
from campaigns.examination import examine
from tests.support import example_passes
from tests.support.tiny_models import Tiny

assert example_passes.SwapLabels.name() == "swap_labels"


def test_two_checkpoints_and_tiny_ones_make_more_than_forty_models(tmp_path: Path) -> None:
    names = [name for name, _ in right_models.models([Path("a"), Path("b")], 1, tmp_path)]
    assert len(set(names)) == len(names) == 55


def test_a_wrong_stage_is_refused_and_a_right_one_is_not(tiny: Tiny, tmp_path: Path) -> None:
    steps = [{"pass": "use_sdpa", "on_fail": "skip"}, {"pass": "swap_labels", "on_fail": "skip"}]
    recipe = {"schema_version": 1, "model": str(tiny()), "device": "cpu", "inputs": {"shapes": [[1, 8]]}, "steps": steps}
    with Workers() as workers:
        right, wrong = examine(recipe, tmp_path / "out", workers, 2, 1, [["the cat sat", "a dog"]])
    assert (right.name, right.pairs, right.refused) == ("use_sdpa", 2, {})
    assert set(wrong.refused) == {0, 1} and "must be at most" in wrong.refused[0]


@pytest.mark.parametrize("variant", right_models.VARIANTS, ids=lambda variant: variant.__name__)
def test_a_variant_is_a_checkpoint_that_loads(tiny: Tiny, tmp_path: Path, variant: Any) -> None:
    from bertopt.modeling import checkpoint

    out = right_models.write(tiny(), tmp_path / "model", variant, seed=1)
    loaded = checkpoint.load(str(out), "text-classification", None)
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert loaded.spec.layers == layers == (1 if variant is right_models.fewer_layers else 2)
    same = (out / "model.safetensors").read_bytes() == (tiny() / "model.safetensors").read_bytes()
    assert not same or variant is right_models.as_it_is
