"""The output directory: runs wait for each other, and nothing that is not bertopt's is ever removed."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertopt import stages
from bertopt.errors import UsageError
from bertopt.modeling.source import sha256
from bertopt.pipeline.store import Store
from bertopt.recipe.parser import from_dict
from bertopt.recipe.texts import Texts
from bertopt.system import environment
from tests.support.tiny_models import write_tiny


def test_the_second_run_says_that_it_waits_and_then_goes_on(tmp_path: Path) -> None:
    said, waiting, entered = [], threading.Event(), threading.Event()

    def tell(words: str) -> None:
        said.append(words)
        waiting.set()

    def second() -> None:
        with Store(tmp_path, False, tell):
            entered.set()

    with Store(tmp_path, False, lambda _: None):
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert waiting.wait(30)
        assert not entered.is_set()
    assert entered.wait(30)
    thread.join(30)
    assert said == [f"waiting for another run in {tmp_path}"]


KEY = "0123456789abcdef" * 4


def stage(out: Path, name: str = "touch") -> Path:
    """A directory as a committed stage leaves it."""
    path = out / "stages" / f"{name}-{KEY[:12]}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"schema_version": 2, "key": KEY}, indent=2))
    return path


def open_and_prune(out: Path, fresh: bool = False) -> None:
    with Store(out, fresh, lambda _: None) as store:
        store.prune()


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_a_report_of_another_program_is_not_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match=f"{name}' is not bertopt's and would be replaced"), Store(tmp_path, False, print):
        pass
    assert (tmp_path / name).read_text() == "{}"
    (tmp_path / name).write_text('{"bertopt_version": "0.1.0"}')
    with Store(tmp_path, False, print):
        pass


@pytest.mark.parametrize("folder", ["stages", "checks"])
def test_somebody_elses_folder_of_our_name_is_refused(tmp_path: Path, folder: str) -> None:
    thesis = tmp_path / folder / "precious" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("x")
    for fresh in (False, True):
        with pytest.raises(UsageError, match=f"{folder}' holds 'precious', which is not bertopt's; choose another"):
            open_and_prune(tmp_path, fresh)
    assert thesis.read_text() == "x"


@pytest.mark.parametrize("fresh", [False, True])
def test_only_stages_and_records_of_ours_are_removed(tmp_path: Path, fresh: bool) -> None:
    ours, unfinished = stage(tmp_path), tmp_path / "stages" / ".part-touch-12"
    unfinished.mkdir()
    kept = [tmp_path / "stages" / name for name in ("notes.txt", "precious/thesis.txt", f"mine-{KEY[:12]}/x", ".part-x/y")]
    kept.append(tmp_path / "checks" / "readme.md")
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    record = tmp_path / "checks" / f"{KEY}.json"
    record.write_text("{}")
    half = tmp_path / "checks" / f".{KEY}.json.12.tmp"
    half.write_text("{")
    open_and_prune(tmp_path, fresh)
    assert not half.exists() and not ours.exists() and not unfinished.exists() and record.exists() != fresh
    assert all(path.read_text() == "x" for path in kept)


def test_stages_of_steps_that_were_not_reached_are_kept(tmp_path: Path) -> None:
    needed, dropped = stage(tmp_path, "export_onnx"), stage(tmp_path, "cast_half")
    with Store(tmp_path, False, lambda _: None) as store:
        store.prune({"export_onnx"})
    assert needed.is_dir() and not dropped.exists()


def test_a_read_only_file_system_is_named_with_what_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(UsageError, match=r"read-only file system; choose another --out.*bertopt verify"):
        open_and_prune(tmp_path)


@pytest.mark.parametrize("folder", ["stages", "checks"])
def test_a_file_where_a_folder_belongs_is_named(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).write_text("x")
    with pytest.raises(UsageError, match=f"{folder}' must be a directory of bertopt's; it is a file"):
        open_and_prune(tmp_path)
    with pytest.raises(UsageError):  # and the lock is free again
        open_and_prune(tmp_path)


@pytest.mark.parametrize(("step", "again"), [("quantize_int8", True), ("export_onnx", False)])
def test_what_depends_on_the_cpu_is_built_again_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, again: bool
) -> None:
    recipe = from_dict({
        "schema_version": 1, "model": "m", "device": "cpu", "inputs": {"shapes": [[2, 8]]}, "steps": [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "quantize_int8"}],
    })  # fmt: skip
    steps = {each.name: each for each in recipe.steps}
    keys = []
    parent = SimpleNamespace(key="parent", spec=SimpleNamespace(task="fill-mask"), checkpoint_sha256=None, checkpoint_commit=None)
    monkeypatch.setattr(stages, "read_manifest", lambda path: parent)
    monkeypatch.setattr(Store, "_stage", lambda self, name, key, device, make: keys.append(key))
    for instructions in (("avx2",), ("avx2", "avx512_vnni")):
        monkeypatch.setattr(environment, "instructions", lambda instructions=instructions: instructions)
        Store(tmp_path, False, lambda _: None).build(Any, steps[step], tmp_path, "cpu", [(2, 8)], Texts(("a",)))
    assert (keys[0] != keys[1]) == again


def test_an_output_that_leads_back_to_itself_or_is_not_utf8_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for out in (loop, loop / "inside"):
        with pytest.raises(UsageError, match="is a link that leads back to itself"):
            Store(out, False, lambda _: None)
    with pytest.raises(UsageError, match=r"must be a path in UTF-8, .*; got b'.*\\xff'"):
        Store(Path(os.fsdecode(os.fsencode(tmp_path) + b"-\xff")), False, lambda _: None)


def test_each_file_of_a_checkpoint_is_read_once_for_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights were read twice, which may be gigabytes, and the two hashes might have differed."""
    read: list[str] = []
    monkeypatch.setattr("bertopt.pipeline.store.sha256", lambda path: read.append(path.name) or sha256(path))
    keys = []
    monkeypatch.setattr(Store, "_stage", lambda self, name, key, device, make, check: keys.append(key))
    model = write_tiny(tmp_path / "model")
    for change in (lambda: None, lambda: None, lambda: (model / "config.json").write_text((model / "config.json").read_text() + "\n")):
        change()
        Store(tmp_path / "out", False, lambda _: None).reference(Any, str(model), "auto", None, "cpu")
    assert keys[0] == keys[1] != keys[2]
    assert read.count("model.safetensors") == read.count("config.json") == 3
