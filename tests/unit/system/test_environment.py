"""What is said of the CPU, by /proc/cpuinfo."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from bertopt.errors import Unsupported
from bertopt.serve import server
from bertopt.serve.settings import Settings
from bertopt.system import environment, machine
from bertopt.workers.client import Workers

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


def test_without_a_whole_proc_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd's ProcSubset=pid hides all but processes. The CPU was said to lack instructions, workers to be killed for want of memory."""
    monkeypatch.setattr(environment, "PROC", tmp_path)
    remedy = r"is not there; mount /proc whole \(systemd: ProcSubset=all\)"
    with pytest.raises(Unsupported, match=rf"reads '{tmp_path}/cpuinfo' to know this CPU's instructions, and it {remedy}"):
        environment.check_isa("onnx", "int8", ["avx512_vnni"], "cpu")
    environment.check_isa("onnx", "float32", ["avx512_vnni"], "cpu")
    with pytest.raises(Unsupported, match=f"cpuinfo' .* {remedy}"):
        machine.read()
    with pytest.raises(Unsupported, match=rf"/stat' to watch its workers, and it {remedy}"):
        Workers()
    pytest.importorskip("uvicorn")
    with pytest.raises(Unsupported, match=rf"/self/fd' to count connections, and it {remedy}"):
        server.serve({}, Settings())


def test_workers_do_not_inherit_what_rounds_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell on an ARM server has it, where torch's float32 products run in oneDNN: the reference would be in bfloat16."""
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        monkeypatch.setenv(name, "BF16")
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    kept = environment.without_float32_rounding()
    assert kept["ONEDNN_VERBOSE"] == "0" and not any(name.endswith("FPMATH_MODE") for name in kept)
