"""The campaign of right models: its cases and what its variants change. All of them: `python -m campaigns.right_models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from campaigns import right_models
from tests.support.tiny_models import Tiny


def test_two_checkpoints_make_forty_cases() -> None:
    assert len(list(right_models.cases([Path("a"), Path("b")], 4))) == 40


@pytest.mark.parametrize("variant", right_models.VARIANTS, ids=lambda variant: variant.__name__)
def test_a_variant_is_a_checkpoint_that_loads(tiny: Tiny, tmp_path: Path, variant: Any) -> None:
    from bertopt.modeling import checkpoint

    out = right_models.write(tiny(), tmp_path / "model", variant, seed=1)
    loaded = checkpoint.load(str(out), "text-classification", None)
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert loaded.spec.layers == layers == (1 if variant is right_models.fewer_layers else 2)
    same = (out / "model.safetensors").read_bytes() == (tiny() / "model.safetensors").read_bytes()
    assert not same or variant is right_models.as_it_is
