"""A path of the wrong kind: a run for an artefact, an artefact for a report, a checkpoint for either."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bertopt import cli
from bertopt.commands import path_advice
from bertopt.errors import UsageError
from bertopt.pipeline.store import Store

REPORT = Path(__file__).parents[3] / "benchmarks/results/quickstart.json"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with its artefact and a stage, a checkpoint, an empty directory and a file of texts, as far as their names go."""
    for folder in ("run/artifact", "run/stages/use_sdpa-0123456789ab", "checkpoint", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(REPORT, tmp_path / "run" / "report.json")
    for folder in ("run/artifact", "run/stages/use_sdpa-0123456789ab"):
        (tmp_path / folder / "manifest.json").write_text("{}")
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "texts.txt").write_text("a text\n")
    monkeypatch.setattr("bertopt.serve.server._log_to_stderr", lambda level: None)  # loggers outlive the test
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*arguments: str) -> str:
    found = CliRunner().invoke(cli.app, list(arguments))
    assert found.exit_code == 2 and found.stdout == "", (arguments, found.stderr)
    return found.stderr.strip()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("run/artifact", "got an artefact or stage; the report of its run is 'run/report.json'"),
        ("run/stages/use_sdpa-0123456789ab", "got an artefact or stage; the report of its run is 'run/report.json'"),
        ("run/artifact/manifest.json", "got the manifest of an artefact; the report of its run is 'run/report.json'"),
        ("checkpoint", "got a checkpoint: `bertopt optimize checkpoint` makes an artefact and a report of it"),
        ("empty", "got another directory"),
        ("texts.txt", "got another file"),
        ("none", "nothing is there: check the path"),
    ],
)
def test_where_a_report_goes(place: Path, given: str, words: str) -> None:
    said = refused("report", given)
    assert said.endswith(words) and "expected a report.json, or the directory of a run that holds one; " in said
    if not (Path(given) / "manifest.json").is_file():
        said = refused("compare", given, "run")
        assert said.endswith(words) and "expected an artefact, a report.json, or the directory of a run that holds one; " in said


def test_compare_says_which_is_which(place: Path) -> None:
    for pair in (("run", "run/artifact"), ("run/artifact", "run")):
        assert "got one of each: 'run/artifact' is an artefact, 'run' a report; name both" in refused("compare", *pair)


@pytest.mark.parametrize("command", [("verify",), ("inspect",), ("bench",), ("profile",), ("sign", "--key", "k"), ("serve",),
                                     ("bulk", "texts.jsonl", "out", "--artifact")], ids=lambda each: each[0])  # fmt: skip
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("run", "did you mean 'run/artifact'?"),
        ("run/report.json", "is a file; give the directory of a stage or artefact, such as out/NAME/artifact"),
        ("checkpoint", "it is a checkpoint: make an artefact of it with `bertopt optimize checkpoint`"),
    ],
)  # fmt: skip
def test_where_an_artefact_goes(place: Path, command: tuple[str, ...], given: str, words: str) -> None:
    (place / "texts.jsonl").write_text('{"text": "a text"}\n')
    said = refused(*command, given)
    assert words in said


@pytest.mark.parametrize("command", [("export",), ("debug", "--stage", "use_sdpa"), ("doctor",)], ids=lambda each: each[0])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("run", "got the report of a run"),
        ("run/report.json", "got the report of a run"),
        ("run/artifact", "got an artefact or stage; the report of its run is 'run/report.json'"),
        ("checkpoint", "got a checkpoint: `bertopt optimize checkpoint` makes"),
        ("empty", "got another directory"),
    ],
)
def test_where_a_recipe_goes(place: Path, command: tuple[str, ...], given: str, words: str) -> None:
    said = refused(*command, given)
    assert said.startswith(f"'{given}' is not a recipe; expected a YAML file, or a name that `bertopt recipes` lists; ") and words in said


def test_no_run_goes_into_an_artefact(place: Path) -> None:
    with pytest.raises(UsageError, match=r"--out must be the directory of a run; .* is an artefact or stage: choose another"), Store(
        place / "run" / "artifact", False, lambda _: None
    ):
        pass
    assert [path.name for path in (place / "run" / "artifact").iterdir()] == ["manifest.json"]


def test_a_path_that_may_not_be_looked_up_is_not_called_missing() -> None:
    """As one without permission is: Python 3.14's pathlib says that nothing is there."""
    with pytest.raises(OSError, match="File name too long"):
        path_advice.advice(Path("x" * 300), "a report.json")
