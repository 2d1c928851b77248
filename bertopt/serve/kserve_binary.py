"""KServe's binary tensor extension: tensors as raw bytes behind the JSON. Triton's clients use it unless told otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertopt.serve.errors import RequestError

#: The header that says how many bytes of a body are JSON.
HEADER = "Inference-Header-Content-Length"


def split(body: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Return the JSON of a body and the tensors behind it. Raises RequestError (400) for a length that cannot be."""
    if length is None:
        return body, b""
    if not length.isdecimal() or len(length) > 18 or int(length) > len(body):
        raise RequestError(400, f"{HEADER}: expected at most {len(body)}, the bytes of the body; got {ascii(length)[:40]}")
    return body[: int(length)], body[int(length) :]


def texts(data: bytes, field: str) -> list[str]:
    """Return the elements of a BYTES tensor: each is its size as a little-endian uint32 and that many bytes of UTF-8."""
    found, place = [], 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 4], "little")
        place += 4 + size
        if place > len(data):
            raise RequestError(400, f"{field}: an element of {size} bytes goes beyond the end of the tensor", field)
        try:
            found.append(data[place - size : place].decode())
        except UnicodeDecodeError as error:
            raise RequestError(400, f"{field}: element {len(found)} is not UTF-8", field) from error
    return found


def written(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | Sequence[str]) -> bytes:
    """Return a tensor as bytes."""
    if isinstance(values, np.ndarray):
        return values.astype("<f4", copy=False).tobytes()
    encoded = [value.encode() for value in values]
    return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)
