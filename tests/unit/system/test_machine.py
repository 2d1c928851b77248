"""Facts about this machine, read as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bertopt.system import environment, limits, machine


def test_this_machine_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RUNTIMES", ("onnxruntime",))
    read = machine.read()
    assert read.cores >= 1 and read.memory_bytes > 1 << 28 and read.packages["torch"]
    assert read.broken == {} and read.shadowed == {}


def test_open_files_are_raised_to_what_a_process_may_allow_itself() -> None:
    script = (
        "import resource; from bertopt.system import limits; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100)); "
        "limits.raise_open_files(); print(limits.most_open_files(), 3 <= limits.open_files() < 64)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "100 True\n"


def test_amx_is_permitted_where_the_native_encoder_gets_it() -> None:
    native = pytest.importorskip("bertopt_native")
    if "amx_int8" not in environment.isa():
        pytest.skip("this CPU has no AMX")
    assert machine._amx_permitted() == ("amx" in native.supported())


def test_a_shadowed_and_a_broken_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("x = 1\n")
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino" / "__init__.py").write_text("raise ImportError('libtbb.so.12: cannot open shared object file')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    shadowed = machine._shadowed({"torch": "1", "openvino": "1", "numpy": "1"})
    assert shadowed == {"torch": str(tmp_path / "torch.py"), "openvino": str(tmp_path / "openvino" / "__init__.py")}
    assert machine._broken(["openvino", "json"]) == {
        "openvino": "ImportError: libtbb.so.12: cannot open shared object file"
    }


def test_an_import_that_hangs_or_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "dies.py").write_text("import os\nos.abort()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert machine._broken(["sleeps"], timeout=0.5) == {"sleeps": "the import did not end within 0.5 s"}
    assert machine._broken(["dies"]) == {"dies": "the import was ended by signal 6"}


def test_an_import_that_is_tried_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor imported OpenVINO and ONNX Runtime as anybody does: they kept ids of the machine in the home, and reported to Google and Microsoft."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    installed = [name for name in ("openvino", "onnxruntime") if find_spec(name) is not None]
    assert machine._broken(installed) == {}
    assert not [*tmp_path.rglob("*")]


def test_temporary_and_cache_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert machine._bad_temp() is None
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert machine._bad_temp() == str(tmp_path / "none")
    (tmp_path / "file").write_text("")
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as nobody:  # a container's user without an entry in passwd has no home: doctor ended with a traceback
        nobody.setattr(os, "getuid", lambda: 4_000_000_000)
        assert machine._hub_cache() == Path("~/.cache/huggingface/hub")
    assert machine._writable(tmp_path / "new" / "hub") and not machine._writable(tmp_path / "file" / "hub")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroups_v2(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "a" / "memory.max", str(4 << 30))
    write(tmp_path / "a" / "b" / "memory.max", "max")
    write(tmp_path / "a" / "b" / "cpu.max", "150000 100000\n")
    write(tmp_path / "a" / "cpu.max", "max 100000\n")
    assert limits.cgroup_memory_bytes(tmp_path, "0::/a/b") == 4 << 30
    assert limits.cgroup_cpus(tmp_path, "0::/a/b") == 1.5
    assert limits.cgroup_memory_bytes(tmp_path, "0::/") is None and limits.cgroup_cpus(tmp_path, "0::/") is None


def test_cgroups_v1(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712")
    write(tmp_path / "memory" / "job" / "memory.limit_in_bytes", str(1 << 30))
    write(tmp_path / "cpu,cpuacct" / "x", "")
    write(tmp_path / "cpu" / "job" / "cpu.cfs_quota_us", "200000")
    write(tmp_path / "cpu" / "job" / "cpu.cfs_period_us", "100000")
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    membership = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/x"
    assert limits.cgroup_memory_bytes(tmp_path, membership) == 1 << 30
    assert limits.cgroup_cpus(tmp_path, membership) == 2.0
    assert limits.cgroup_memory_bytes(tmp_path, "5:memory:/") is None
    # A container sees the host's path, which is not there: its own root counts.
    write(tmp_path / "memory" / "memory.limit_in_bytes", str(1 << 29))
    assert limits.cgroup_memory_bytes(tmp_path, "5:memory:/docker/123") == 1 << 29


def test_time_that_a_quota_held_back(tmp_path: Path) -> None:
    """Only that of a container with cgroup v2 was seen: not a systemd unit's, and none of v1."""
    write(tmp_path / "cpu.stat", "usage_usec 10\n")
    write(tmp_path / "unit" / "cpu.stat", "usage_usec 10\nnr_throttled 3\nthrottled_usec 2500000\n")
    write(tmp_path / "cpu" / "job" / "cpu.stat", "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n")
    assert limits.cgroup_throttled_s(tmp_path, "0::/unit") == 2.5
    assert limits.cgroup_throttled_s(tmp_path, "4:cpu,cpuacct:/job\n0::/") == 1.5
    assert limits.cgroup_throttled_s(tmp_path, "0::/") == 0.0


def test_packages_older_than_the_metadata_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any extra; local builds and release candidates count as their version."""
    lines = ["numpy>=1.26", "torch>=2.11; extra == 'build'", "openvino>=2026.2; extra == 'cpu'", "sphinx>=8; extra == 'docs'"]
    monkeypatch.setattr(machine.metadata, "requires", lambda _: lines)
    installed = {"numpy": "1.26.4", "torch": "2.12.0rc1+cpu", "openvino": "2025.3.0", "transformers": "5.5.0"}
    assert machine._outdated(installed) == {"openvino": ">=2026.2"}
    assert machine._outdated(installed | {"numpy": "1.25.2", "openvino": "2026.4.1"}) == {"numpy": ">=1.26"}

    def missing(_: str) -> None:
        raise machine.metadata.PackageNotFoundError

    monkeypatch.setattr(machine.metadata, "requires", missing)
    assert machine._outdated(installed) == {}
