"""Carry wheels to a machine without a network: split them into parts of a given size, join them there.

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d WHEELS pydantic pydantic-core …
    python benchmarks/gpu/wheels.py thin WHEELS --sm 90   # without machine code for other GPUs: onnxruntime-gpu 247 → 112 MB
    python benchmarks/gpu/wheels.py split WHEELS PARTS --mib 15
    python benchmarks/gpu/wheels.py join PARTS WHEELS     # there: sha256 of every part and of every wheel is checked
    python -m pip install --no-index --no-deps WHEELS/*.whl

Needs Python alone. Joining what came so far is no error with --partial: whole wheels are written, the rest is named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INDEX = "parts.json"
#: How nvcc's bundle of programs for several GPUs begins: magic number, version 1, the size of this head.
_BUNDLE, _HEAD = struct.pack("<IHH", 0xBA55ED50, 1, 16), 16
#: Kind of an entry that is machine code; others are PTX.
_MACHINE_CODE = 2


class Damaged(Exception):
    """A part or wheel that is not what was split."""


def split(wheels: Path, parts: Path, size: int) -> int:
    """Write every wheel of a folder as parts of at most `size` bytes, and `parts.json`; return how many there are."""
    parts.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    number = 0
    for wheel in sorted(wheels.glob("*.whl")):
        data, entries = wheel.read_bytes(), []
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            name = f"part-{number:04d}.bin"
            (parts / name).write_bytes(piece)
            entries.append({"name": name, "sha256": hashlib.sha256(piece).hexdigest()})
            number += 1
        index[wheel.name] = {"sha256": hashlib.sha256(data).hexdigest(), "parts": entries}
    (parts / INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    return number


def join(parts: Path, wheels: Path, partial: bool = False) -> list[str]:
    """Write the wheels whose parts are all there; return the names of those that were not written.

    Raises Damaged for a part or wheel whose hash differs, a name that leaves the folder, and, without `partial`, a missing
    part. Nothing is written of a wheel that does not fit its hash.
    """
    index = json.loads((parts / INDEX).read_text("utf-8"))
    wheels.mkdir(parents=True, exist_ok=True)
    absent = []
    for name, entry in index.items():
        for one in (name, *(part["name"] for part in entry["parts"])):
            if Path(one).name != one:
                raise Damaged(f"{INDEX} names '{one}', which leaves the folder")
        missing = [part["name"] for part in entry["parts"] if not (parts / part["name"]).is_file()]
        if missing and not partial:
            raise Damaged(f"'{missing[0]}' of {name} is missing; copy all parts, or say --partial")
        if missing:
            absent.append(name)
            continue
        data = b""
        for part in entry["parts"]:
            piece = (parts / part["name"]).read_bytes()
            if hashlib.sha256(piece).hexdigest() != part["sha256"]:
                raise Damaged(f"'{part['name']}' is not the part that was split (sha256 differs); copy it again")
            data += piece
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise Damaged(f"{name} is not the wheel that was split (sha256 differs)")
        (wheels / name).write_bytes(data)
    return absent


def thin(wheel: Path, sm: int) -> int:
    """Put zeros, which take no room in a wheel, in the place of machine code for other GPUs; return how many bytes.

    Offsets stay as they are, and a driver loads the entries of its own GPU only. The hashes in the wheel's RECORD no longer match; pip does
    not verify them.
    """
    emptied, partial = 0, wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            data = bytearray(old.read(entry))
            if entry.filename.endswith(".so"):
                for start, end in _other_code(data, sm):
                    data[start:end] = bytes(end - start)
                    emptied += end - start
            new.writestr(entry, bytes(data), zipfile.ZIP_DEFLATED)
    partial.replace(wheel)
    return emptied


def _other_code(data: bytearray, sm: int) -> Iterator[tuple[int, int]]:
    """Yield where machine code for GPUs other than `sm` lies in a library."""
    bundle = data.find(_BUNDLE)
    while bundle >= 0:
        end = min(len(data), bundle + _HEAD + struct.unpack_from("<Q", data, bundle + 8)[0])
        entry = bundle + _HEAD
        while entry + 32 <= end:
            kind, _, head, size = struct.unpack_from("<HHIQ", data, entry)
            (capability,) = struct.unpack_from("<I", data, entry + 28)
            if kind == _MACHINE_CODE and capability != sm:
                yield entry + head, min(end, entry + head + size)
            entry += head + size
        bundle = data.find(_BUNDLE, max(end, bundle + _HEAD))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("thin", "split", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--sm", type=int, default=90, help="compute capability to keep machine code for")
    parser.add_argument("--mib", type=float, default=15.0, help="largest part [MiB]")
    parser.add_argument("--partial", action="store_true", help="join what is there")
    asked = parser.parse_args()
    if asked.do == "thin":
        for wheel in sorted(asked.source.glob("*.whl")):
            print(f"{wheel.name}: {thin(wheel, asked.sm)} bytes emptied, {wheel.stat().st_size} left")
        return
    if asked.target is None:
        parser.error(f"{asked.do} needs a target folder")
    if asked.do == "split":
        print(f"{split(asked.source, asked.target, int(asked.mib * 2**20))} parts")
        return
    try:
        absent = join(asked.source, asked.target, asked.partial)
    except Damaged as error:
        raise SystemExit(f"error: {error}") from error
    print(f"incomplete: {', '.join(absent)}" if absent else "all wheels are whole")


if __name__ == "__main__":
    main()
