"""What is said of the CPU, by /proc/cpuinfo."""

from __future__ import annotations

import platform

import pytest

from bertopt.system import environment

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C \nflags\t\t: fpu avx2 avx512_vnni\n"
NEOVERSE_V1 = (
    "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
    "CPU variant\t: 0x1\nCPU part\t: 0xd40\nCPU revision\t: 1\n\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "name", "isa"),
    [
        (INTEL * 2, "Intel(R) Xeon(R) Platinum 8488C", ["avx2", "avx512_vnni"]),
        (NEOVERSE_V1 * 2, "implementer 0x41, part 0xd40", ["asimddp", "i8mm", "bf16"]),
        ("", platform.machine(), []),
    ],
)
def test_two_kinds_of_cpu_have_two_names(cpuinfo: str, name: str, isa: list[str]) -> None:
    """Figures recorded on one ARM CPU are no other's: all would be `aarch64`."""
    assert environment.cpu_name(cpuinfo).removeprefix(f"{platform.machine()}, ") == name
    assert environment.isa(cpuinfo) == isa
