"""Which of the files that a process opens are neither a model's nor every machine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bertopt.checks import probes
from bertopt.system import opened_files


def test_data_is_named_and_descriptions_of_packages_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_files.tempfile, "gettempdir", lambda: "/nowhere")
    # As in a container that runs as a user whom no file names.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987_654_321)
    artefact, checkout = tmp_path / "artifact", tmp_path / "checkout"
    described = [checkout / "bertopt.egg-info" / "entry_points.txt", checkout / "bertopt-1.dist-info" / "METADATA"]
    data, own = checkout / "scale.txt", artefact / "config.json"
    for path in [*described, data, own]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    opened = {str(path) for path in [*described, data, own]}
    assert opened_files.elsewhere(opened, [artefact]) == [data]


def test_what_bertopt_itself_reads_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_files.sys, "prefix", str(tmp_path))  # as in a checkout, which lies beside the environment
    with opened_files.noting() as opened:
        assert probes.built_in_texts()
    assert any(name.endswith("texts.jsonl") for name in opened) and not opened_files.elsewhere(opened, [tmp_path])


def test_files_are_seen_however_a_pass_reads_them(tmp_path: Path) -> None:
    """safetensors opens files in Rust, of which Python's audit hooks hear nothing."""
    code = """
import json, sys
from bertopt.checks import probes
from bertopt.system import opened_files
with opened_files.noting() as opened:
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import load_file
    with safe_open(sys.argv[1] + "/a.safetensors", "np") as file:
        assert list(file.keys()) == ["x"]
    with opened_files.noting() as inside:
        assert load_file(sys.argv[1] + "/b.safetensors")["x"].sum() == 3
    assert inside == {sys.argv[1] + "/b.safetensors"}
    np.load(sys.argv[1] + "/c.npy")
    open(sys.argv[1] + "/written", "w").close()
np.load(sys.argv[1] + "/d.npy")
print(json.dumps(sorted(path for path in opened if path.startswith(sys.argv[1]))))
"""
    names = ["a.safetensors", "b.safetensors", "c.npy"]
    for name in names[:2]:
        save_file({"x": np.ones(3)}, tmp_path / name)
    for name in ("c.npy", "d.npy"):
        np.save(tmp_path / name, np.ones(3))
    # An audit hook stays in its process for good.
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [str(tmp_path / name) for name in names]
