"""The inner loops of the tiles keep their accumulators in registers. g++ 12 did not, until the products became inline assembly."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bertopt_native import _core

ARM = platform.machine() == "aarch64"
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
BRANCH = re.compile(r"b|b\..+|[ct]bn?z|ret" if ARM else r"j.+")
STACK = re.compile(r"\[sp" if ARM else r"\(%r[sb]p")
#: By what a full tile's loop adds, and how often: two steps of 12 rows by 2 vectors, by AVX2 of 6 rows; AVX-VNNI's `vpdpbusd` is written
#: `{vex} vpdpbusd`. On ARM two steps of 6 rows by 4 vectors, four of 5 rows.
FULL = (
    [("usmmla", 24), ("bfmmla", 24), ("sdot", 80), ("fmla", 80)]
    if ARM
    else [("vpdpbusd", 48), ("vdpbf16ps", 48), ("vfmadd231ps", 24), ("vpmaddwd", 24), ("{vex}", 12)]
)


def inner_loops() -> list[list[tuple[str, str]]]:
    """Return the instructions of every loop without a loop inside."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    code = [(int(m[1], 16), m[2], m[3]) for m in map(LINE.match, text.splitlines()) if m]
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops = []
    for i, (address, name, rest) in enumerate(code):
        target = re.search(r"\b([0-9a-f]+) <", rest) if BRANCH.fullmatch(name) else None
        if not target or not int(target[1], 16) < address:
            continue
        start = index.get(int(target[1], 16))
        if start is None or i - start > 400:
            continue
        body = [(n, r) for _, n, r in code[start : i + 1]]
        if sum(bool(BRANCH.fullmatch(n)) for n, _ in body) == 1:
            loops.append(body)
    return loops


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize(("product", "times"), FULL)
def test_nothing_goes_to_the_stack(product: str, times: int) -> None:
    full = [b for b in inner_loops() if sum(n == product for n, _ in b) >= times]
    assert len(full) >= 2, f"expected the loops of full tiles with {product}: has the tile another shape?"
    for body in full:
        assert not [f"{n} {r}" for n, r in body if STACK.search(r)]


@pytest.mark.skipif(ARM or not shutil.which("objdump"), reason="needs objdump and x86-64")
@pytest.mark.parametrize("product", ["tdpbusd", "tdpbf16ps"])
def test_tiles_are_loaded_once_for_two_products(product: str) -> None:
    """A block of 32 by 32 sums: four products a step for four loads, and no sum leaves its tile before the last step."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    steps = re.findall(rf"(?:\n[^\n]*\b(?:tileloadd|{product}|mov|lea|add|sub|shl|prefetcht0)\b[^\n]*)+", text)
    full = [s for s in steps if s.count(product) == 4 and s.count("tileloadd") == 4]
    assert len(full) >= 2, f"expected steps of full blocks with {product}: has the block another shape?"


def test_other_code_runs_on_any_cpu() -> None:
    """Nothing but the kernels has AVX: the module opens, and says what is missing, where they cannot run."""
    objects = list(Path(_core.__file__).resolve().parent.glob("**/core.dir/src/*.o"))
    if not objects:
        pytest.skip("needs the build folder")
    for path in objects:
        text = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
        ).stdout
        assert not re.search(r"[yz]mm\d", text), path.name
