"""Nothing stays of a process that was killed: no directory, no interpreter."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import bertopt
from bertopt.system import process_tree, temporary_directory
from tests.support.artefacts import write_artefact
from tests.support.tiny_models import Tiny

PARENT = """
import json, os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdin.write(json.dumps({"directory": "", "device": "cpu", "threads": 1, "passes": [], "out": "", "parent": os.getpid()}))
child.stdin.close()
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import time
from bertopt.runtime import replay_process
def load(*_):
    print("loads", flush=True)
    time.sleep(60)
replay_process.load = load
replay_process.main()
"""


def test_every_temporary_directory_is_named_after_its_owner_so_that_it_is_swept() -> None:
    root = Path(bertopt.__file__).parent
    # One with `dir=` lies in another.
    users = [path for path in root.rglob("*.py") if re.search(r"TemporaryDirectory\((?!dir=)|mkdtemp", path.read_text())]
    assert [str(path.relative_to(root)) for path in users] == ["system/temporary_directory.py"]


def test_a_directory_that_its_owner_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that start and end side by side list each other's directories; a test run failed on it."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f"bertopt-{ended.pid}-left"
    left.mkdir()
    removed = tmp_path / f"bertopt-{ended.pid}-removed"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([removed, left]))
    is_dir = Path.is_dir  # true of the one that is removed between this question and the next
    monkeypatch.setattr(Path, "is_dir", lambda self, **named: self == removed or is_dir(self, **named))
    with temporary_directory.make() as made:
        assert Path(made).is_dir() and not left.exists()


def test_a_directory_that_another_thread_has_just_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that loaded artefacts side by side removed each other's private copies."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdtemp = tempfile.mkdtemp

    def beside_another(prefix: str) -> str:
        monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
        name = mkdtemp(prefix=prefix)
        thread = threading.Thread(target=temporary_directory.make)
        thread.start()
        thread.join()
        return name

    monkeypatch.setattr(tempfile, "mkdtemp", beside_another)
    with temporary_directory.make() as made:
        assert Path(made).is_dir()


def test_a_directory_of_a_process_that_is_seen_from_here_by_no_id_stays(tmp_path: Path) -> None:
    """Containers that share a temporary directory do not see each other's processes: a run in one removed what a run in another was using."""
    code = """
import sys
from pathlib import Path
from bertopt.system import process_tree, temporary_directory
made = temporary_directory.make()
print(flush=True)
sys.stdin.readline()
print(Path(made.name).is_dir())
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    owner.stdout.readline()
    sweep = "from bertopt.system import process_tree, temporary_directory; process_tree.runs = lambda pid: False; temporary_directory.make()"
    subprocess.run([sys.executable, "-c", sweep], check=True, env=environment)
    said, _ = owner.communicate("\n")
    assert said.split() == ["True"]
    assert not list(tmp_path.iterdir())


def test_without_a_place_for_temporary_files_it_is_said_what_is_needed(tiny: Tiny, tmp_path: Path) -> None:
    """With a root file system that is read-only an intact artefact of torch was said to be damaged, and `verify` named the current directory."""
    artefact = write_artefact(tiny(), tmp_path / "artefact", "eager")
    code = """
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc"]
from bertopt.cli import main
main(sys.argv[1:])
"""
    variables = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    rows = tmp_path / "rows.txt"
    rows.write_text("a text\n")
    for command in (["verify", str(artefact)], ["bulk", str(rows), str(tmp_path / "out"), "--artifact", str(artefact)]):
        ended = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False, env=variables)
        assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
            5, "temporary files need a directory that can be written, with room; tried ['/proc']: mount one, such as a tmpfs at /tmp, or set TMPDIR",
        )  # fmt: skip


def test_descriptors_that_a_daemon_closes_are_not_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that become daemons close all files, and others get their numbers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = temporary_directory.make()
    (held,) = (int(file.name) for file in Path("/proc/self/fd").iterdir() if file.exists() and file.samefile(made.name))
    os.close(held)
    file = (tmp_path / "other").open("w")
    assert file.fileno() == held
    made.cleanup()
    file.write("is open")
    file.close()
    assert not Path(made.name).exists()


def test_a_directory_of_an_earlier_process_with_this_id_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"bertopt-{os.getpid()}-left"
    left.mkdir()
    with temporary_directory.make():
        assert not left.exists()


def test_a_fork_that_ends_leaves_the_directory_of_its_parent() -> None:
    """A worker of gunicorn that ended removed the private copy of the model that its parent holds open."""
    code = """
import os, sys
from bertopt.system import temporary_directory
made = temporary_directory.make()
child = os.fork()
if child:
    os.waitpid(child, 0)
    print(os.path.isdir(made.name), made.name)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, name = ended.stdout.split()
    assert kept == "True" and not Path(name).exists()


def test_the_interpreter_that_replays_an_artefact_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert process_tree.ends(child, 20.0)


def test_the_interpreter_does_not_start_where_its_parent_is_gone_already() -> None:
    request = {"directory": "", "device": "cpu", "threads": 1, "passes": [], "out": "", "parent": 1}
    ended = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "loads" not in ended.stdout
