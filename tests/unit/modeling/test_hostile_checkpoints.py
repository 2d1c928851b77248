"""A few of the hostile checkpoints of `campaigns.faults.hostile`: each is refused as the file's fault, none as ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bertopt.errors import BertoptError, IntegrityError
from bertopt.modeling import checkpoint
from bertopt.system.untrusted import reading
from campaigns.faults.checkpoints import every
from tests.support.tiny_models import Tiny

CASES = {case.name: case for case in every()}
FEW = [name for name in CASES if any(word in name for word in (
    "hidden_size = '-1'", "hidden_act = 'no_such'", "post_processor", "normalizer", "max_seq_length", "model_max_length = '-1'",
    "other dtype", "modules.json: dict", "index []", "tokenizer.json: deep", "model.safetensors: pickle", "is a directory",
))]  # fmt: skip


def test_names_differ_and_there_are_many() -> None:
    assert len(list(every())) == len(CASES) >= 200


@pytest.mark.parametrize("name", FEW)
def test_a_hostile_checkpoint_is_refused_or_harmless(name: str, tiny: Tiny, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny(), directory)
    case = CASES[name]
    case.spoil(directory)
    try:
        with reading("the checkpoint", "restore it"):
            model = checkpoint.load(directory)
            checkpoint.write_snapshot(model, tmp_path)
        code = 0
    except BertoptError as error:
        code = error.exit_code
        assert "\n" not in str(error) and len(str(error)) < 2000
    assert code in case.codes, name


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(("depth", "refused"), [(90, False), (101, True), (600, True), (50_000, True)])
def test_json_nested_too_deeply_is_the_files_fault(name: str, depth: int, refused: bool, tiny: Tiny, tmp_path: Path) -> None:
    """Python's parser takes some 600 levels that what walks through them afterwards does not."""
    directory = shutil.copytree(tiny(), tmp_path / "model")
    text = (directory / name).read_text().rstrip()
    (directory / name).write_text(text[:-1] + f', "bertopt": {"[" * depth}1{"]" * depth}}}')
    if not refused:
        checkpoint.load(directory)
        return
    with pytest.raises(IntegrityError, match=rf"{name}' must be .*restore the checkpoint"):
        checkpoint.load(directory)
