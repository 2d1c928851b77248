"""Watch the machine during a race: other processes, CPU steal, quotas, a changing clock rate; the same for a GPU.

Not seen: other tenants' use of caches and memory bandwidth, other processes where the system hides them, and a GPU's
clocks between two looks (one look a round, while all contenders are paused).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bertopt.system import gpu, limits
from bertopt.system.gpu import GpuState

#: Share of all cores that other processes may use, and that a hypervisor or quota may take, before a warning.
OTHERS_SHARE, STEAL_SHARE = 0.10, 0.03
#: Change of speed from the first to the last third of a race from which a warning is given.
DRIFT = 0.15
#: Additions in one calibration: about 2 ms.
_WORK = 40_000


@dataclass(frozen=True)
class Seen:
    """Seconds of each calibration, in time order, and CPU seconds: used by others, stolen by a hypervisor, held back by a
    quota, and available in all."""

    speeds: Sequence[float]
    others: float
    stolen: float
    throttled: float
    available: float
    gpu: Sequence[GpuState] = ()
    """The GPU at every look, in time order; empty where the race does not use it or NVML cannot be asked."""
    pids: Sequence[int] = ()

    @property
    def drift(self) -> float:
        """How many times as long a calibration took in the last third as in the first."""
        third = len(self.speeds) // 3
        # The fastest of each third: a single disturbed calibration is no drift.
        return min(self.speeds[-third:]) / min(self.speeds[:third]) if third else 1.0


class _CpuSeconds(NamedTuple):
    """CPU seconds so far: of all processes, stolen, of this process and the timed ones, held back by a quota."""

    busy: float
    stolen: float
    ours: float
    throttled: float


class MachineWatch:
    """Watches from its construction on. `pids` are the processes that are timed; `on_gpu`: whether they use one."""

    def __init__(self, pids: Sequence[int], on_gpu: bool = False) -> None:
        self.pids = pids
        self.speeds: list[float] = []
        self._on_gpu, self._gpu = on_gpu, list[GpuState]()
        self._look()
        self._start, self._before = time.monotonic(), self._cpu_seconds()

    def calibrate(self) -> None:
        """Time a fixed piece of work in this process, while all contenders are paused."""
        start = time.perf_counter()
        total = 0
        for number in range(_WORK):
            total += number
        self.speeds.append(time.perf_counter() - start)
        self._look()

    def _look(self) -> None:
        if self._on_gpu and (state := gpu.state()) is not None:
            self._gpu.append(state)

    def stolen(self) -> float:
        """Return the seconds that all CPUs together were taken, by a hypervisor or quota: one of two for 1 s counts 0.5."""
        now = self._cpu_seconds()
        return (now.stolen + now.throttled) / (os.cpu_count() or 1)

    def seen(self) -> Seen:
        pairs = zip(self._cpu_seconds(), self._before, strict=True)
        used = _CpuSeconds(*(after - before for after, before in pairs))
        available = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return Seen(self.speeds, used.busy - used.ours, used.stolen, used.throttled, available, self._gpu, self.pids)

    def _cpu_seconds(self) -> _CpuSeconds:
        import psutil

        times = psutil.cpu_times()
        # Not idle time, and not guests: these are counted in user and nice already. Only Linux has all of them.
        busy = times.user + times.system + sum(getattr(times, kind, 0.0) for kind in ("nice", "irq", "softirq"))
        ours = sum(_cpu_s(pid) for pid in [os.getpid(), *self.pids])
        return _CpuSeconds(busy, getattr(times, "steal", 0.0), ours, limits.cgroup_throttled_s())


def findings(seen: Seen) -> list[str]:
    """Return a warning for everything that disturbed a race."""
    warnings = []
    if seen.others > OTHERS_SHARE * seen.available:
        warnings.append(f"other processes used {seen.others / seen.available:.0%} of the CPUs during the race")
    if seen.stolen > STEAL_SHARE * seen.available:
        warnings.append(f"CPU steal: the hypervisor took {seen.stolen / seen.available:.0%} of the CPUs")
    if seen.throttled > STEAL_SHARE * seen.available:
        warnings.append(f"a CPU quota held processes back for {seen.throttled:.2g} s")
    if abs(math.log(seen.drift)) > math.log1p(DRIFT):
        change = "slower" if seen.drift > 1 else "faster"
        warnings.append(f"the machine became {abs(seen.drift - 1):.0%} {change} during the race")
    return warnings + _gpu_findings(seen)


def _gpu_findings(seen: Seen) -> list[str]:
    if not seen.gpu:
        return []
    warnings = []
    # In another PID namespace NVML lists none of ours, and strangers cannot be told from them.
    strangers = {pid for state in seen.gpu for pid in state.processes} - set(seen.pids)
    if strangers and any(set(state.processes) & set(seen.pids) for state in seen.gpu):
        warnings.append(f"{len(strangers)} other process{'es' if len(strangers) > 1 else ''} used the GPU during the race")
    if reasons := dict.fromkeys(why for state in seen.gpu for why in state.throttling):
        warnings.append(f"the GPU lowered its clock during the race: {', '.join(reasons)}")
    clocks = [state.clock_mhz for state in seen.gpu if state.clock_mhz]
    third = max(1, len(clocks) // 3)
    # The fastest of each third: a GPU that idles between two turns lowers its clock for a moment.
    if len(clocks) > 1 and abs(math.log(max(clocks[-third:]) / max(clocks[:third]))) > math.log1p(DRIFT):
        warnings.append(f"the GPU's clock changed during the race, from {max(clocks[:third])} to {max(clocks[-third:])} MHz")
    if seen.gpu[0].mig:
        warnings.append("the GPU is a MIG slice: its neighbours share the memory's bandwidth")
    if seen.gpu[0].mps:
        warnings.append("MPS runs: processes of others share the GPU's cores")
    return warnings


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, including those of its children that it has waited for."""
    import psutil

    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.Error:
        return 0.0
