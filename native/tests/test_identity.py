"""A text's numbers are the same to the last bit: alone, among others, in any order, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from conftest import ISAS
from numpy.typing import NDArray

Packed = Callable[..., Path]


def batch(texts: list[NDArray[np.int32]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    return np.concatenate(texts), np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)


def random_texts(count: int, longest: int, seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, n).astype(np.int32) for n in rng.integers(1, longest + 1, count)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("output", ["tokens", "first", "mean", "max"])
def test_other_texts_order_and_threads(precision: str, isa: str, output: Any, packed: Packed) -> None:
    encoders = [bertopt_native.Encoder(packed(precision=precision), threads=n, isa=isa) for n in (1, 2, 3, 7)]
    texts = random_texts(200, 80, 0)
    pooled = output != "tokens"

    def rows(encoder: bertopt_native.Encoder, chosen: list[int]) -> list[NDArray[np.float32]]:
        ids, starts = batch([texts[i] for i in chosen])
        out = encoder.run(ids, starts, output=output, normalize=pooled)
        return list(out) if pooled else np.split(out, starts[1:-1])

    alone = [rows(encoders[0], [i])[0] for i in range(len(texts))]
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 4, 9, 30, 200, 200):
        chosen = rng.permutation(len(texts))[:size].tolist()
        for encoder in encoders:
            for i, got in zip(chosen, rows(encoder, chosen), strict=True):
                assert (got == alone[i]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("hidden", [384, 768])
def test_the_last_layer_writes_no_input_for_a_next_one(hidden: int, precision: str, isa: str, packed: Packed) -> None:
    """Widths with kernels of their own, and more tokens than a chunk of the feed-forward: its rows lie side by side."""
    options = {"hidden_size": hidden, "num_attention_heads": hidden // 32, "num_hidden_layers": 1, "intermediate_size": 4 * hidden}
    encoder = bertopt_native.Encoder(packed(precision=precision, **options), threads=1, isa=isa)
    texts = random_texts(120, 4, 1)
    for output in ("tokens", "first", "mean"):
        got = encoder.run(*batch(texts), output=output)
        alone = [encoder.run(text, [0, len(text)], output=output) for text in texts]
        assert (got == np.concatenate(alone)).all()


def test_broken_numbers_stay_in_their_text(tmp_path: Path) -> None:
    """An infinite embedding spoils the text that has it, and no other."""
    from bertopt_native import layout
    from conftest import network, state

    model = network("bert")
    for precision in ("int8", "bf16"):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), precision)
        raw = bytearray((tmp_path / "m").read_bytes())
        entry = layout.ENTRY.unpack_from(raw, layout.HEADER.size)
        row = np.frombuffer(raw, np.float32, 64, entry[6] + 7 * 64 * 4)
        row[:] = np.inf
        (tmp_path / "m").write_bytes(raw)
        for isa in ISAS:
            encoder = bertopt_native.Encoder(tmp_path / "m", threads=2, isa=isa)
            good, bad = np.arange(20, 53, dtype=np.int32), np.full(30, 7, np.int32)
            want = encoder.run(good, [0, len(good)], output="mean")[0]
            ids, starts = batch([bad, good, bad, good, bad])
            got = encoder.run(ids, starts, output="mean")
            assert (got[1] == want).all() and (got[3] == want).all() and np.isnan(got[0]).all()


def test_many_callers(packed: Packed) -> None:
    encoder = bertopt_native.Encoder(packed(), threads=2)
    texts = random_texts(120, 80, 3)
    want = encoder.run(*batch(texts), output="mean")

    def call(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(texts))[: int(rng.integers(1, 40))]
        return bool((encoder.run(*batch([texts[i] for i in chosen]), output="mean") == want[chosen]).all())

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(call, range(300)))


@pytest.mark.slow
def test_ten_thousand_random_calls(packed: Packed) -> None:
    encoders = [bertopt_native.Encoder(packed(precision=p), threads=n) for p in ("int8", "bf16") for n in (1, 2)]
    texts = random_texts(1000, 40, 5)
    alone = [[e.run(t, [0, len(t)], output="mean")[0] for t in texts] for e in encoders[::2]]
    rng = np.random.default_rng(6)
    for _ in range(2500):
        chosen = rng.integers(0, len(texts), int(rng.integers(1, 12))).tolist()
        for which, encoder in enumerate(encoders):
            got = encoder.run(*batch([texts[i] for i in chosen]), output="mean")
            assert all((g == alone[which // 2][i]).all() for g, i in zip(got, chosen, strict=True))
