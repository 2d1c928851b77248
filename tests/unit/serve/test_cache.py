"""The cache of outputs: bounded by bytes, least recently used first."""

from __future__ import annotations

import numpy as np

from bertopt.serve.batcher import EncodedText
from bertopt.serve.cache import ENTRY_BYTES, Cache


def text(*ids: int, types: list[int] | None = None) -> EncodedText:
    return EncodedText(np.array(ids), None if types is None else np.array(types))


def outputs(value: float, count: int = 8) -> dict[str, np.ndarray]:
    return {"v": np.full(count, value, np.float32)}


def test_it_holds_what_was_used_last_and_never_more_than_its_bytes() -> None:
    entry = 8 + 32 + ENTRY_BYTES
    cache = Cache(3 * entry)
    for number in (1, 2, 3):
        cache.put(text(number), outputs(number))
    assert cache.get(text(1)) is not None
    cache.put(text(4), outputs(4))
    assert cache.get(text(2)) is None and cache.used == 3 * entry
    assert [cache.get(text(n)) is not None for n in (1, 3, 4)] == [True, True, True]
    cache.put(text(5), outputs(5, 10_000))
    assert cache.get(text(5)) is None and cache.used <= cache.capacity


def test_types_are_part_of_the_key_and_a_batch_is_not_kept_alive() -> None:
    cache = Cache(1 << 16)
    whole = np.zeros((100, 4), np.float32)
    cache.put(text(1, 2), {"v": whole[3]})
    assert cache.get(text(1, 2, types=[0, 1])) is None
    kept = cache.get(text(1, 2))
    assert kept is not None and kept["v"].base is None
