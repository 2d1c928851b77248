"""Outputs of texts that were seen before: the least recently used ones go, by bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from bertopt.serve.batcher import EncodedText

if TYPE_CHECKING:
    from bertopt.core import Array

#: Bytes that an entry takes besides its arrays and key, about.
ENTRY_BYTES = 512


class Cache:
    """At most `capacity` bytes of outputs by token ids and types. What a request asks for of them is not part of the key:
    raw outputs are kept, and options come after."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0
        self._entries: OrderedDict[tuple[bytes, bytes], dict[str, Array]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: EncodedText) -> dict[str, Array] | None:
        """Return the outputs of a text, or None; they are not to be written to."""
        with self._lock:
            key = _key(text)
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
            return found

    def put(self, text: EncodedText, outputs: dict[str, Array]) -> None:
        """Keep a copy of `outputs`, unless it alone is more than the capacity."""
        key = _key(text)
        size = _size(key, outputs)
        if size > self.capacity:
            return
        # A copy: a row of a batch would keep the whole batch alive.
        copy = {name: value.copy() for name, value in outputs.items()}
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = copy
            self.used += size
            while self.used > self.capacity:
                old, values = self._entries.popitem(last=False)
                self.used -= _size(old, values)


def _key(text: EncodedText) -> tuple[bytes, bytes]:
    return text.ids.tobytes(), b"" if text.types is None else text.types.tobytes()


def _size(key: tuple[bytes, bytes], outputs: dict[str, Array]) -> int:
    return sum(map(len, key)) + sum(value.nbytes for value in outputs.values()) + ENTRY_BYTES
