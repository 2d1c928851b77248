"""What disturbs a race is noticed, and the timed processes do not count as others."""

from __future__ import annotations

import signal
import subprocess
import sys

from bertopt.system import cpu_contention
from bertopt.system.cpu_contention import MachineWatch, Seen


def test_a_calm_machine_gives_no_warning() -> None:
    assert cpu_contention.findings(Seen([0.002] * 9, others=0.05, stolen=0.01, throttled=0.0, available=4.0)) == []
    assert cpu_contention.findings(Seen([], 0, 0, 0, 0)) == [] == cpu_contention.findings(Seen([0.002, 0.004], 0, 0, 0, 1.0))
    # One calibration that was disturbed is no drift, and where others are hidden their time is negative.
    assert cpu_contention.findings(Seen([0.02, 0.002, 0.002, 0.002, 0.002, 0.002, 0.002, 0.02, 0.002], -1.0, 0, 0, 4.0)) == []


def test_what_disturbs_is_named() -> None:
    assert cpu_contention.findings(Seen([], others=1.0, stolen=0.0, throttled=0.0, available=4.0)) == [
        "other processes used 25% of the CPUs during the race"
    ]
    assert cpu_contention.findings(Seen([], 0.0, 0.4, 0.0, 4.0)) == ["CPU steal: the hypervisor took 10% of the CPUs"]
    assert cpu_contention.findings(Seen([], 0.0, 0.0, 0.4, 4.0)) == ["a CPU quota held processes back for 0.4 s"]
    slower = [0.0020, 0.0021, 0.0022, 0.0025, 0.0026, 0.0027]
    assert cpu_contention.findings(Seen(slower, 0, 0, 0, 4.0)) == ["the machine became 30% slower during the race"]
    assert cpu_contention.findings(Seen(slower[::-1], 0, 0, 0, 4.0)) == ["the machine became 23% faster during the race"]


def test_the_timed_processes_are_not_others() -> None:
    """What processes under watch use is counted as theirs, and only theirs."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin), subprocess.Popen(spin)]
    try:
        both, none = MachineWatch([process.pid for process in processes]), MachineWatch([])
        while sum(cpu_contention._cpu_s(process.pid) for process in processes) < 0.5:
            both.calibrate()
        used = [now - then for now, then in zip(both._cpu_seconds(), both._before, strict=True)]
        unseen = [now - then for now, then in zip(none._cpu_seconds(), none._before, strict=True)]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert used[2] - unseen[2] >= 0.4
    assert len(both.speeds) > 2 and min(both.speeds) > 0
