"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
