"""The packed file as bytes: the counterpart of src/format.h.

A header of 256 bytes, a table with one entry a tensor, the tensors. Every tensor begins at a multiple of 64 bytes.
Weights lie in panels of 32 channels: [N/32][K/step][2][16][step] with a step of 4 int8 or 2 bf16, which serves every
instruction set with 16 lanes of 32 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertopt_native.errors import BadFile

MAGIC = b"BERTNAT\n"
LAYOUT_VERSION = 5
_FIRST_VERSION = 1
ALIGNMENT = 64
PANEL = 32
#: What products have of inputs at most, so that the sums of an INT8 product fit int32.
WIDEST = 65536
HEADER = struct.Struct("<8sIIQQ17If16s9I100s")
ENTRY = struct.Struct("<6IQQ")
assert (HEADER.size, ENTRY.size) == (256, 40)


class Type(IntEnum):
    """Types of tensors, as in src/format.h."""

    F32 = 0
    U32 = 1
    INT8 = 2
    BF16 = 3


_TYPES: dict[int, Any] = {Type.F32: np.float32, Type.U32: np.uint32, Type.INT8: np.int8, Type.BF16: np.uint16}


class Tensor(IntEnum):
    """Numbers of tensors, as in src/format.h. Those of a linear product are its number + `Part`."""

    WORD = 0
    POSITION = 1
    TOKEN_TYPE = 2
    EMBEDDING_GAIN = 3
    EMBEDDING_SHIFT = 4
    LAYER_MAP = 5
    RELATIVE_BIAS = 6
    ROTARY = 7
    ATTENTION_GAIN = 8
    ATTENTION_SHIFT = 9
    FFN_GAIN = 10
    FFN_SHIFT = 11
    LAYER_WINDOW = 12
    PLACES = 13
    DISTANCE_KEYS = 14
    DISTANCE_QUERIES = 15
    PROJECTION = 16
    QKV = 20
    ATTENTION_OUT = 24
    FFN_IN = 28
    FFN_OUT = 32
    HEAD_DENSE = 36
    DECODER = 40
    HEAD_GAIN = 44
    HEAD_SHIFT = 45
    FIRST_GAIN = 46
    FIRST_SHIFT = 47


#: Linear products.
PRODUCTS = (Tensor.PROJECTION, Tensor.QKV, Tensor.ATTENTION_OUT, Tensor.FFN_IN, Tensor.FFN_OUT, Tensor.HEAD_DENSE, Tensor.DECODER)


class Part(IntEnum):
    """The tensors of a linear product."""

    WEIGHT = 0
    SCALE = 1
    SUM = 2
    BIAS = 3


@dataclass(frozen=True)
class Stored:
    """One tensor of the file: its number, the stored layer, its logical shape and its bytes."""

    tensor: int
    layer: int
    type: Type
    rows: int
    cols: int
    data: NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """The numbers of the header, in its order."""

    activation: int
    hidden: int
    embedding: int
    heads: int
    head_size: int
    head_stride: int
    intermediate: int
    layers: int
    stored_layers: int
    vocabulary: int
    token_types: int
    positions: int
    position_offset: int
    position_rule: int
    pad_id: int
    relative_bias: int
    epsilon: float
    family: str
    rotary: int = 0
    gated: int = 0
    norm_first: int = 0
    window: int = 0
    distances: int = 0
    uncentred: int = 0
    vocabulary_head: int = 0
    head_activation: int = 0
    dropped: int = 0

    @property
    def version(self) -> int:
        """The oldest layout that has what the network needs, so that older libraries open it."""
        if self.dropped or self.norm_first > 2:
            return LAYOUT_VERSION
        if self.vocabulary_head:
            return 4
        if self.distances or self.uncentred or self.norm_first > 1:
            return 3
        return 2 if self.rotary or self.gated or self.norm_first or self.window else _FIRST_VERSION


def panels(weight: NDArray[Any], step: int) -> NDArray[Any]:
    """Return `weight` [N, K] in the order of the file, flat."""
    n, k = weight.shape
    return np.ascontiguousarray(weight.reshape(n // PANEL, 2, 16, k // step, step).transpose(0, 3, 1, 2, 4)).reshape(-1)


def from_panels(data: NDArray[Any], n: int, k: int, step: int) -> NDArray[Any]:
    """Return the weight [N, K] whose order in the file `data` is."""
    return np.ascontiguousarray(data.reshape(n // PANEL, k // step, 2, 16, step).transpose(0, 2, 3, 1, 4)).reshape(n, k)


def padded(offset: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def write(path: Path, sizes: Sizes, tensors: Sequence[Stored]) -> None:
    """Write the file, under another name until it is whole."""
    offsets, at = [], padded(HEADER.size + ENTRY.size * len(tensors))
    for t in tensors:
        offsets.append(at)
        at = padded(at + t.data.nbytes)
    table = b"".join(
        ENTRY.pack(t.tensor, t.layer, t.type, t.rows, t.cols, 0, offset, t.data.nbytes)
        for t, offset in zip(tensors, offsets, strict=True)
    )
    fields = [value.encode() if isinstance(value, str) else value for value in astuple(sizes)]
    head = HEADER.pack(MAGIC, sizes.version, HEADER.size, at, HEADER.size, len(tensors), *fields, bytes(100))
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(head + table)
            for t, offset in zip(tensors, offsets, strict=True):
                file.write(bytes(offset - file.tell()))
                file.write(np.ascontiguousarray(t.data).data)
            file.write(bytes(at - file.tell()))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> tuple[Sizes, dict[tuple[int, int], Stored]]:
    """Return the numbers of a packed file and its tensors by number and layer, their data as it lies in the file, flat.

    Raises `BadFile` for a file of another layout, one that is cut short, and one whose table is damaged.
    """
    whole = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    if len(whole) < HEADER.size or bytes(whole[: len(MAGIC)]) != MAGIC:
        raise BadFile(f"'{path.name}' is no packed file")
    _, version, _, size, table, count, *fields, _ = HEADER.unpack(whole[: HEADER.size].tobytes())
    if not _FIRST_VERSION <= version <= LAYOUT_VERSION or size != len(whole) or table + count * ENTRY.size > size:
        raise BadFile(f"'{path.name}' must have layout {_FIRST_VERSION} to {LAYOUT_VERSION} and {size} bytes; got layout {version} and {len(whole)} bytes")
    tensors: dict[tuple[int, int], Stored] = {}
    for at in range(table, table + count * ENTRY.size, ENTRY.size):
        tensor, layer, kind, rows, cols, _, offset, length = ENTRY.unpack(whole[at : at + ENTRY.size].tobytes())
        stored = _TYPES.get(kind)
        if stored is None or offset + length > size or length != rows * cols * np.dtype(stored).itemsize:
            raise BadFile(f"'{path.name}' is damaged: tensor {tensor} of layer {layer} has type {kind}, shape [{rows}, {cols}] and {length} bytes from byte {offset} of {size}")
        data = whole[offset : offset + length].view(stored)
        tensors[tensor, layer] = Stored(tensor, layer, Type(kind), rows, cols, data)
    values: list[Any] = [value.rstrip(b"\0").decode(errors="replace") if isinstance(value, bytes) else value for value in fields]
    return Sizes(*values), tensors
