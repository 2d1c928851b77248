"""The inner loops of the tiles keep their accumulators in registers. g++ 12 did not, until the products became inline assembly."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bertopt_native import _core

LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")
VECTOR_TO_STACK = re.compile(r"[xyz]mm\d+.*\(%r[sb]p|\(%r[sb]p.*[xyz]mm\d+")


def inner_loops() -> list[list[tuple[str, str]]]:
    """Return the instructions of every loop without a loop inside."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    code = [(int(m[1], 16), m[2], m[3]) for m in map(LINE.match, text.splitlines()) if m]
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops = []
    for i, (address, name, rest) in enumerate(code):
        target = re.match(r"([0-9a-f]+)", rest)
        if not name.startswith("j") or not target or not int(target[1], 16) < address:
            continue
        start = index.get(int(target[1], 16))
        if start is None or i - start > 400:
            continue
        body = [(n, r) for _, n, r in code[start : i + 1]]
        if sum(n.startswith("j") for n, _ in body) == 1:
            loops.append(body)
    return loops


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize(("product", "a_step"), [("vpdpbusd", 24), ("vdpbf16ps", 24), ("vfmadd231ps", 12), ("vpmaddwd", 12), ("{vex}", 6)])
def test_no_vector_goes_to_the_stack(product: str, a_step: int) -> None:
    """Full tiles: two steps of 12 rows by 2 vectors in one loop, by AVX2 of 6 rows. AVX-VNNI's `vpdpbusd` is written `{vex} vpdpbusd`."""
    full = [b for b in inner_loops() if sum(n == product for n, _ in b) >= 2 * a_step]
    assert len(full) >= 2, f"expected the loops of full tiles with {product}: has the tile another shape?"
    for body in full:
        spills = [f"{n} {r}" for n, r in body if VECTOR_TO_STACK.search(r)]
        assert not spills, spills
        memory = [f"{n} {r}" for n, r in body if re.search(r"\(%r[sb]p", r)]
        assert not memory, f"pointers on the stack: {memory}"


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
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
