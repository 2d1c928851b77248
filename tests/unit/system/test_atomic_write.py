"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertopt.errors import UsageError
from bertopt.system import atomic_write


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        there.append((tmp_path / "report.json").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    atomic_write.write(tmp_path / "report.json", "{}")
    assert there == [False]
    assert (tmp_path / "report.json").read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_an_error_stops_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write.replacing(path) as new:
        new.write_text("half")
        raise RuntimeError
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]
    with atomic_write.replacing(path) as new:
        new.write_text("new")
    assert [each.read_text() for each in tmp_path.iterdir()] == ["new"]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught, atomic_write.replacing(tmp_path / "part.csv"), Path("/dev/full").open("w") as full:
        full.write("a")
    assert caught.value.filename == str(tmp_path / "part.csv")


def test_a_place_is_checked_before_there_is_anything_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    for place in (tmp_path, tmp_path / "file" / "x", tmp_path / ("x" * 300), Path("/proc/x.xml")):
        with pytest.raises(UsageError) as checked:
            atomic_write.check(place)
        with pytest.raises(UsageError) as written:
            atomic_write.write(place, "new")
        assert all(str(each.value).startswith(f"'{place}' cannot be written (") for each in (checked, written))
    atomic_write.check(tmp_path / "file")
    atomic_write.check(tmp_path / "new" / "j.xml")
    assert (tmp_path / "file").read_text() == "old" and not list((tmp_path / "new").iterdir())
