"""Messages between bertopt and its workers: one JSON document, then raw arrays. No pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bertopt.core import Array


def send(connection: Connection, message: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> None:
    arrays = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    connection.send_bytes(json.dumps({**message, "arrays": layout}).encode())
    for array in arrays.values():
        connection.send_bytes(array.data.cast("B") if array.size else b"")


def numbered(several: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the arrays of several mappings, such as batches, in one: as `<number>/<name>`."""
    return {f"{number}/{name}": array for number, one in enumerate(several) for name, array in one.items()}


def by_number(arrays: Mapping[str, Array], count: int) -> list[dict[str, Array]]:
    """Return the `count` mappings whose arrays were `numbered`."""
    several: list[dict[str, Array]] = [{} for _ in range(count)]
    for key, array in arrays.items():
        number, name = key.split("/", 1)
        several[int(number)][name] = array
    return several


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, Array]]:
    """One message. Raises EOFError where the other end is gone."""
    message: dict[str, Any] = json.loads(connection.recv_bytes())
    arrays = {}
    for name, dtype, shape in message.pop("arrays"):
        # bytearray: torch wants writable memory.
        arrays[name] = np.frombuffer(bytearray(connection.recv_bytes()), dtype=dtype).reshape(shape)
    return message, arrays
