"""Files that a user's pass reads are part of what was checked: another content is another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertopt.core import Context, Eager, Pass, Result
from bertopt.errors import IntegrityError
from bertopt.modeling.source import sha256
from bertopt.passes import registry
from bertopt.passes.use_sdpa import UseSdpa
from bertopt.stages import sources
from tests.support import specs


class ReadsData(Pass[Eager, Eager]):
    """Reads a scale from a file that no stage holds."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "reads_data", ReadsData)


def read(data: Path, inside: Path, by: Any = None, recorded: dict[str, str] | None = None) -> dict[str, str]:
    """Return what is recorded of a pass that reads `data`."""
    found = dict[str, str]()
    with sources.reading(by or ReadsData(), [inside], found, recorded):
        data.read_text()
    return found


@pytest.mark.parametrize("name", ["scale.txt", "scale.py"])
def test_a_file_that_changed_since_a_stage_was_built(tmp_path: Path, name: str) -> None:
    """Source may be read and run without an import."""
    data, inside = tmp_path / name, tmp_path / "stage"
    data.write_text("1.0")
    recorded = read(data, inside)
    (key,) = recorded
    assert key.startswith("file of pass reads_data: ") and key.endswith(name)
    sources.check_here(recorded)
    assert read(data, inside, recorded=recorded) == recorded
    data.write_text("1.01")
    with pytest.raises(IntegrityError, match=r"scale.*', which a pass read, is not the file that the stage was built with"):
        sources.check_here(recorded)
    with pytest.raises(IntegrityError, match=r"pass 'reads_data' reads '.*scale.*', which is not the file .*; restore it, or export again"):
        read(data, inside, recorded=recorded)
    data.unlink()
    with pytest.raises(IntegrityError):
        sources.check_here(recorded)


def test_a_file_in_another_place(tmp_path: Path) -> None:
    """As on another machine."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scale.txt").write_text("1.0")
    recorded = read(tmp_path / "here" / "scale.txt", tmp_path / "stage")
    read(tmp_path / "there" / "scale.txt", tmp_path / "stage", recorded=recorded)
    (tmp_path / "there" / "scale.txt").write_text("2.0")
    with pytest.raises(IntegrityError):
        read(tmp_path / "there" / "scale.txt", tmp_path / "stage", recorded=recorded)


def test_an_artefact_does_not_say_where_files_were(tmp_path: Path) -> None:
    for folder in ("here", "home", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "scale.txt").write_text(folder)
    recorded = read(tmp_path / "here" / "scale.txt", tmp_path) | read(tmp_path / "home" / "scale.txt", tmp_path / "stage") | {"pass reads_data": "0"}
    recorded |= read(tmp_path / "here" / "scale.txt", tmp_path / "stage")
    delivered = sources.without_folders(recorded)
    assert delivered is not None and sorted(delivered) == ["file of pass reads_data: scale.txt", "pass reads_data"]
    for folder in ("here", "home"):
        read(tmp_path / folder / "scale.txt", tmp_path / "stage", recorded=delivered)
    with pytest.raises(IntegrityError):
        read(tmp_path / "other" / "scale.txt", tmp_path / "stage", recorded=delivered)
    assert sources.without_folders(None) is None


def test_what_is_not_recorded(tmp_path: Path) -> None:
    data = tmp_path / "stage" / "config.json"
    data.parent.mkdir()
    data.write_text("{}")
    assert read(data, data.parent) == {}, "files of the stage are hashed already"
    assert read(data, tmp_path / "other", by=UseSdpa()) == {}, "bertopt's own passes read nothing else"
    # An artefact of an earlier bertopt recorded none.
    read(data, tmp_path / "other", recorded={"pass reads_data": "0"})
    sources.check_here(None)


def test_a_module_that_was_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran its recipe again after a change was told to export again, each time."""
    helper = tmp_path / "rules_of_a_pass.py"
    helper.write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    recorded = {"module rules_of_a_pass": sha256(helper), "module that_is_gone": "0", "module tests.support.specs": sha256(Path(specs.__file__))}
    sources.check_here(recorded)
    helper.write_text("SCALE = 1.01\n")
    with pytest.raises(IntegrityError, match=r"rules_of_a_pass.py', which a pass read, is not the file"):
        sources.check_here(recorded)
