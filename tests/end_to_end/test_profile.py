"""`bertopt profile` on a committed stage."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.cli import main
from bertopt.commands.profile import profile
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.report.profile import Profile
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def stage(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stage 00 of a tiny checkpoint."""
    out: Path = tmp_path_factory.mktemp("stage")
    model = checkpoint.load(tiny())
    checkpoint.write_snapshot(model, out)
    (out / "rewrites.json").write_text("[]\n")
    fields = {"device": "cpu", "passes": [], "changes": {}, **stages.describe(model)}
    stages.write_manifest(out, fields)
    return out


def call(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["profile", *arguments])
    return ended.value.code


def test_table_json_and_page(stage: Path, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(stage), "--shape", "2x8") == 0
    out = capsys.readouterr().out
    for words in ("layer 1", "matrix product", "between operators", "one call", "operators account for", "batch 2 × 8"):
        assert words in out
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat\nthe dog ran on\n")
    page = tmp_path / "new" / "profile.html"
    given = ("--texts", str(texts), "--attention", "a good film", "--against", str(tiny()), "--html", str(page), "--json")
    assert call(str(stage), *given) == 0
    shown = capsys.readouterr()
    assert f"page: {page}" in shown.err
    found = Profile.model_validate(json.loads(shown.out))
    assert (found.batch, found.sequence) == (2, 6)
    assert found.attention is not None and found.attention.tokens == ["[CLS]", "a", "good", "film", "[SEP]"]
    assert "Attention of the fp32 reference" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "8,128"], "expected BATCHxTOKENS, such as 8x128"),
        (["--shape", "1x8", "--texts", "x.txt"], "not both"),
        (["--attention", "a text"], "give --html FILE"),
        (["--attention", "a text", "--json"], "give --against CHECKPOINT"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], words: str, stage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(stage), *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attention", "a", "--json", "--against", "no/such/model"], "'no/such/model' is neither a directory nor a hub id"),
        (["--html", "."], "cannot be written (Is a directory)"),
    ],
)
def test_other_paths_are_checked_before_the_work(
    arguments: list[str], words: str, stage: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertopt.commands.profile.Workers", None)
    assert call(str(stage), *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_form_without_a_profiler_is_refused_at_once(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest stage before it that has one is named: the step between them was dropped by the run."""
    monkeypatch.setattr("bertopt.commands.profile.Workers", None)
    parent = Path(shutil.copytree(stage, tmp_path / "stages" / "reference-0123456789ab"))
    artefact = Path(shutil.copytree(stage, tmp_path / "artifact"))
    steps = [{"name": "use_sdpa", "after": "reference"}, {"name": "fast", "after": "use_sdpa"}]
    fields = {**stages.read_manifest(stage).model_dump(mode="json", exclude={"files", "manifest_sha256"}), "form": "native"}
    stages.write_manifest(artefact, {**fields, "stage": "fast", "recipe": {"steps": steps}})
    with pytest.raises(Unsupported, match=f"is native, .* bertopt bench times it, bertopt profile '{re.escape(str(parent))}' looks inside"):
        profile(artefact)
    stages.write_manifest(artefact, fields)
    with pytest.raises(Unsupported, match="bertopt profile looks inside an earlier stage of its run, in OUT/stages"):
        profile(artefact)
