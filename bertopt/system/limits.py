"""Limits on this process's memory, CPU time and open files, by cgroups and rlimits."""

from __future__ import annotations

import math
import os
import re
import resource
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
#: cgroup v1 says "no limit" with a number near 2⁶³.
_NO_LIMIT = 1 << 60
#: Each connection of a server takes one open file; 1,024 is a usual default.
_OPEN_FILES = 1 << 20


def host_memory_bytes() -> int:
    """Return the memory of the machine in bytes, whatever of it this process may use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_memory_bytes(root: Path = _ROOT, membership: str | None = None) -> int | None:
    """Return the memory limit [bytes] of this process's cgroup or of one above it, or None where there is none."""
    found = [
        int(text)
        for folder in _folders(root, "memory", membership)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdecimal()
    ]
    limit = min(found, default=_NO_LIMIT)
    return limit if limit < _NO_LIMIT else None


def visible_cores() -> int:
    """Return the number of CPU cores that this process may run on, whatever share of their time it gets."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:  # denied, as by a seccomp filter
        return os.cpu_count() or 1


def cores() -> int:
    """Return the number of CPU cores that this process may keep busy: visible ones, or fewer by its cgroup's quota, rounded up."""
    quota = cgroup_cpus()
    return visible_cores() if quota is None else max(1, min(visible_cores(), math.ceil(quota)))


def quota_threads() -> int | None:
    """Return how many threads a CPU quota leaves time for, or None where it is no limit.

    Runtimes count visible cores: their threads spend the quota early in each period and then all wait for the next.
    """
    usable = cores()
    return usable if usable < visible_cores() else None


def cgroup_cpus(root: Path = _ROOT, membership: str | None = None) -> float | None:
    """Return the CPUs that the cgroup's quota allows, such as 1.5, or None where there is no quota."""
    found = []
    for folder in _folders(root, "cpu", membership):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        ]  # fmt: skip
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def cgroup_throttled_s(root: Path = _ROOT, membership: str | None = None) -> float:
    """Return for how many seconds the quota of this process's cgroup, or of one above it, has held processes back so far."""
    most = 0.0
    for folder in _folders(root, "cpu", membership):
        stat = dict(line.split(maxsplit=1) for line in _read(folder / "cpu.stat").splitlines())
        most = max(most, int(stat.get("throttled_usec", 0)) / 1e6, int(stat.get("throttled_time", 0)) / 1e9)
    return most


def address_space_bytes() -> int | None:
    """Return the limit of virtual memory (`ulimit -v`) in bytes, or None where there is none."""
    return _soft(resource.RLIMIT_AS)


def data_bytes() -> int | None:
    """Return the limit of memory for data (`ulimit -d`) in bytes, or None where there is none. Shared memory and files do not count."""
    return _soft(resource.RLIMIT_DATA)


def _soft(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def has_cpu_time_limit() -> bool:
    """Return whether the CPU time of each process is limited (`ulimit -t`)."""
    return resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY


def most_open_files() -> int:
    """Return how many files and sockets this process may have open (`ulimit -n`)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_open_files() -> None:
    """Let this process open as many files as it may allow itself, up to `_OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def open_files() -> int:
    """Return how many files and sockets are open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def little_address_space(status: str | None = None) -> str | None:
    """Return text about a limit of virtual memory if this process has used more than half of it, else None.

    Libraries then fail in various ways: they raise other errors, crash, or cannot start a thread.
    """
    status = _read(Path("/proc/self/status")) if status is None else status
    limited = (("address space", address_space_bytes(), "VmPeak", "ulimit -v"), ("memory for data", data_bytes(), "VmData", "ulimit -d"))
    for what, limit, field, command in limited:
        used = re.search(rf"{field}:\s+(\d+) kB", status)
        if limit is not None and used is not None and int(used.group(1)) * 1024 >= limit / 2:
            return f"{what} is limited to {limit / 2**30:.1f} GiB ({command}) and {int(used.group(1)) / 2**20:.1f} GiB of it were used; raise the limit"
    return None


def memory_bytes() -> int:
    """Return the memory that this process can use in bytes: the machine's, or less where its cgroup allows less."""
    return min(host_memory_bytes(), cgroup_memory_bytes() or _NO_LIMIT)


def _folders(root: Path, controller: str, membership: str | None) -> list[Path]:
    """The cgroup directories that bound this process, v1 and v2, from its own up to the root."""
    folders = []
    for line in (_read(Path("/proc/self/cgroup")) if membership is None else membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's, which is not there; the root is then the container's own.
        folders += [base / part for part in (inside, *inside.parents)]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
