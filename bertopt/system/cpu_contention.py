"""What else the machine did while the clock ran: other processes, stolen time, quotas, a changing clock rate.

Read from /proc and cgroups on Linux. Not seen: other tenants' use of caches and memory bandwidth, what a GPU does for
others, and other processes where the system hides them from /proc/stat.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Share of all cores that others may use, and that a hypervisor or quota may withhold, before a warning.
OTHERS_SHARE, WITHHELD_SHARE = 0.10, 0.03
#: Change of speed from the first to the last third of a race from which a warning is given.
DRIFT = 0.15
_HERTZ = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
#: Additions in one calibration: about 2 ms.
_WORK = 40_000


@dataclass(frozen=True)
class Seen:
    """Seconds of each calibration, in time order, and CPU seconds: that others used, that a hypervisor or a quota withheld,
    and of all there are."""

    speeds: Sequence[float]
    others: float
    stolen: float
    throttled: float
    available: float

    @property
    def drift(self) -> float:
        """How many times as long a calibration took in the last third as in the first."""
        third = len(self.speeds) // 3
        # The fastest of each third: what disturbs one calibration is no drift.
        return min(self.speeds[-third:]) / min(self.speeds[:third]) if third else 1.0


class Machine:
    """Watches from its construction on. `pids` are the processes that are timed."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self.speeds: list[float] = []
        self._began, self._before = time.monotonic(), self._ticks()

    def calibrate(self) -> None:
        """Time a fixed piece of work in this process, while all that are raced sleep."""
        start = time.perf_counter()
        total = 0
        for number in range(_WORK):
            total += number
        self.speeds.append(time.perf_counter() - start)

    def withheld(self) -> float:
        """Seconds so far that all CPUs together were withheld, by a hypervisor or quota: one of two for 1 s counts 0.5."""
        _, stolen, _, throttled = self._ticks()
        return (stolen + throttled) / (os.cpu_count() or 1)

    def seen(self) -> Seen:
        busy, steal, ours, throttled = (
            after - before for after, before in zip(self._ticks(), self._before, strict=True)
        )
        available = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return Seen(self.speeds, others=busy - ours, stolen=steal, throttled=throttled, available=available)

    def _ticks(self) -> tuple[float, float, float, float]:
        """Seconds so far: all processes', stolen, this process's and the timed ones', held back by a quota."""
        busy = steal = throttled = 0.0
        stat = Path("/proc/stat")
        if stat.is_file():
            # user nice system idle iowait irq softirq steal …
            fields = [int(field) / _HERTZ for field in stat.read_text().split("\n", 1)[0].split()[1:]]
            busy, steal = sum(fields[:3]) + sum(fields[5:7]), fields[7]
        quota = Path("/sys/fs/cgroup/cpu.stat")
        if quota.is_file():
            found = dict(line.split() for line in quota.read_text().splitlines())
            throttled = int(found.get("throttled_usec", 0)) / 1e6
        return busy, steal, sum(_cpu_s(pid) for pid in [os.getpid(), *self.pids]), throttled


def findings(*seen: Seen) -> list[str]:
    """Warnings about all of it together; of drifts the largest."""
    others, stolen, throttled, available = (
        sum(getattr(each, what) for each in seen) for what in ("others", "stolen", "throttled", "available")
    )
    found = []
    if others > OTHERS_SHARE * available:
        found.append(f"other processes used {others / available:.0%} of the CPUs meanwhile")
    if stolen > WITHHELD_SHARE * available:
        found.append(f"the hypervisor withheld {stolen / available:.0%} of the CPUs")
    if throttled > WITHHELD_SHARE * available:
        found.append(f"a CPU quota held processes back for {throttled:.2g} s")
    drift = max((each.drift for each in seen), key=lambda drift: abs(math.log(drift)), default=1.0)
    if not 1 / (1 + DRIFT) <= drift <= 1 + DRIFT:
        found.append(f"the machine became {abs(drift - 1):.0%} {'slower' if drift > 1 else 'faster'} meanwhile")
    return found


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, with those of its children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _HERTZ
