"""The INT8 products are exactly those of integers; the encoder's arithmetic follows a model in numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from bertopt_native import _core, checkpoint, layout, packing, quantize
from conftest import ISAS, cosines, network, state, texts_of
from numpy.typing import NDArray

#: Those whose attention is float32.
FLOAT_ISAS = [isa for isa in ISAS if isa in ("avx2", "avx_vnni", "avx512_vnni", "neon_dotprod")]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [32, 64, 384, 1536, 4096])
def test_products_equal_integers(k: int, isa: str) -> None:
    rng = np.random.default_rng(k)
    for rows in [*range(1, 26), 47, 128]:
        a = rng.integers(0, 256, (rows, k), dtype=np.uint8)
        w = rng.integers(-127, 128, (96, k), dtype=np.int8)
        got = _core.int8_product(a, layout.panels(w, 4), isa)
        assert (got == a.astype(np.int64) @ w.astype(np.int64).T).all()


@pytest.mark.parametrize("isa", ISAS)
def test_products_do_not_saturate(isa: str) -> None:
    a = np.full((13, 65536), 255, np.uint8)
    for value in (127, -127):
        got = _core.int8_product(a, layout.panels(np.full((32, 65536), value, np.int8), 4), isa)
        assert (got == 255 * 65536 * value).all()


@pytest.mark.skipif("amx" not in ISAS, reason="this CPU has no AMX, or the system does not permit it")
def test_amx_differs_in_attention_alone(packed: Callable[..., Path]) -> None:
    """The INT8 products are the same integers; texts of at most eight tokens have the same attention too."""
    encoders = [bertopt_native.Encoder(packed(), threads=2, isa=isa) for isa in ("amx", "avx512_bf16")]
    short, long = ([1, 8, 3, 5, 8, 7] * 20, [9, 40, 8])
    for lengths, equal in ((short, True), (long, False)):
        ids, starts = texts_of(lengths)
        amx, vectors = (e.run(ids, starts) for e in encoders)
        assert (amx == vectors).all() == equal
        assert cosines(amx, vectors).min() > 0.999


@pytest.mark.skipif("avx512_vnni" not in ISAS, reason="this CPU has no AVX512-VNNI")
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_vectors_of_eight_have_the_bits_of_avx512_vnni(precision: str, packed: Callable[..., Path]) -> None:
    """Sixteen lanes are two vectors of eight, and sums run in the same order."""
    isas = ["avx512_vnni", *(isa for isa in ISAS if isa in ("avx2", "avx_vnni"))]
    encoders = [bertopt_native.Encoder(packed(precision=precision, hidden_size=384, intermediate_size=640), threads=2, isa=isa) for isa in isas]
    ids, starts = texts_of([1, 40, 8, 80, 3])
    avx512, *others = (e.run(ids, starts) for e in encoders)
    assert others and all((other == avx512).all() for other in others)


def of_integers(model: Any) -> dict[str, NDArray[Any]]:
    """Return weights whose int8 form is exact, so that it is the same wherever they are packed."""
    rng, tensors = np.random.default_rng(0), state(model)
    for name, tensor in sorted(tensors.items()):
        if not np.issubdtype(tensor.dtype, np.floating):
            continue
        whole = rng.integers(-127, 128, tensor.shape)
        whole[..., 0] = 127
        tensors[name] = (1 + whole / 512 if "LayerNorm.weight" in name else whole / 512).astype(np.float32)
    return tensors


@pytest.mark.parametrize("isa", FLOAT_ISAS)
@pytest.mark.parametrize(("precision", "digest"), [("int8", "6a8edc79319be1e0"), ("bf16", "5c4b4350072edbf9")])
def test_bits_are_the_same_on_every_architecture(precision: Any, digest: str, isa: str, tmp_path: Path) -> None:
    """Where attention is float32: x86-64 and ARM do the same operations in the same order, on the same file."""
    model = network("bert")
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), of_integers(model), precision)
    ids, starts = texts_of([1, 40, 8, 79, 3, 33])
    got = bertopt_native.Encoder(tmp_path / "m", threads=2, isa=isa).run(ids, starts)
    assert hashlib.sha256(got.tobytes()).hexdigest()[:16] == digest


def quantised(x: NDArray[np.float32], low: float = 0.0) -> NDArray[np.float64]:
    """Return rows as the encoder's uint8 represents them: up to eight elements beyond a fifth of a row's largest are exact."""
    return np.stack([_quantised(row, np.float32(low)) for row in x])


def _quantised(x: NDArray[np.float32], low: np.float32) -> NDArray[np.float64]:
    rest = np.ones(len(x), bool)
    while True:
        least, most = np.minimum(x[rest].min(), low), np.maximum(x[rest].max(), np.float32(0))
        outer = rest & (np.abs(x) > np.float32(0.2) * np.maximum(-least, most))
        if not outer.any() or len(x) - (rest & ~outer).sum() > 8:
            break
        rest &= ~outer
    scale = (most - least) / np.float32(255)
    zero = -least / scale
    q = np.clip(np.rint(x / scale + zero), 0, 255)
    return np.where(rest, (q - zero) * scale, x).astype(np.float64)


def numpy_encoder(model: Any, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Return the last hidden states of one text with the encoder's quantisation, the rest in float64."""
    net = checkpoint.read(model.config.to_dict(), state(model))
    t, heads = net.tensors, net.heads
    hidden = len(t["embeddings.norm.bias"])
    head = hidden // heads
    stride, inner = packing._up(head), packing._up(len(t["layers.0.ffn_in.bias"]))

    def norm(x: NDArray[Any], name: str) -> NDArray[Any]:
        x = x - x.mean(1, keepdims=True)
        return np.asarray(
            x / np.sqrt((x**2).mean(1, keepdims=True) + net.epsilon) * t[f"{name}.weight"] + t[f"{name}.bias"]
        )

    def linear(x: NDArray[Any], wb: tuple[Any, Any], low: float = 0.0) -> NDArray[np.float64]:
        q, scale = quantize.to_int8(wb[0])
        return quantised(x.astype(np.float32), low) @ (q.astype(np.float64) * scale[:, None]).T + wb[1]

    import math

    x = t["embeddings.word"][ids] + t["embeddings.position"][: len(ids)] + t["embeddings.token_type"][0]
    x = norm(x.astype(np.float64), "embeddings.norm")
    for i in range(len(net.layer_map)):
        products = packing._products(net, i, head, stride, inner)
        qkv = linear(x, products["qkv"]).reshape(len(ids), heads, 3, stride)
        scores = np.einsum("qhd,khd->hqk", qkv[:, :, 0], qkv[:, :, 1])
        p = np.exp2(scores - scores.max(2, keepdims=True))
        context = np.einsum("hqk,khd->qhd", p / p.sum(2, keepdims=True), qkv[:, :, 2]).reshape(len(ids), -1)
        x = norm(x + linear(context, products["attention_out"]), f"layers.{i}.attention_norm")
        h = linear(x, products["ffn_in"])
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = norm(x + linear(h, products["ffn_out"], -0.17005), f"layers.{i}.ffn_norm")
    return x


@pytest.mark.parametrize("isa", ISAS)
def test_encoder_follows_the_model_in_numpy(isa: str, tmp_path: Path) -> None:
    """Quantisation itself costs far more than the two differ: it is the same quantisation."""
    from conftest import cosines, reference

    model = network("bert", num_hidden_layers=1)
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model))
    ids, starts = texts_of([60])
    got = bertopt_native.Encoder(tmp_path / "m", isa=isa).run(ids, starts)
    lost = 1 - cosines(got, reference(model, ids, starts)).mean()
    differs = 1 - cosines(got, numpy_encoder(model, ids)).mean()
    assert differs < lost / 2, (differs, lost)  # what is left is bf16 in attention


@pytest.mark.parametrize("isa", FLOAT_ISAS)
@pytest.mark.parametrize("channel", [0, 1, 2, 3, 29, 62])
def test_an_outlying_channel_follows_the_model_in_numpy(channel: int, isa: str, tmp_path: Path) -> None:
    """Wherever it lies in a row: with weights as large as the others', so that a trace of it in the 8 bits would show.

    By the kernels whose attention is float32: bf16 rounds keys that have it by more than is looked for.
    """
    import torch

    model = network("bert", num_hidden_layers=1)
    with torch.no_grad():
        model.embeddings.LayerNorm.bias[channel] = 30
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model))
    ids, starts = texts_of([60])
    got = bertopt_native.Encoder(tmp_path / "m", isa=isa).run(ids, starts)
    want = numpy_encoder(model, ids)
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("channels", [{0: 100}, {17: -100}, {63: 100}, {3: 100, 40: 85}, {5: -90, 6: -100, 63: -70}, {1: 10, 30: -5}, {1: 100, 30: -100, 31: 20, 62: 4}], ids=str)
def test_outlying_channels_take_no_precision_from_the_others(channels: dict[int, float], isa: str, tmp_path: Path) -> None:
    """Some channels are up to 100 times as large as the rest in every normalisation, which int8 products read."""
    import torch
    from conftest import reference

    model = network("bert", num_hidden_layers=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            for channel, value in channels.items():
                if "LayerNorm.bias" in name:
                    p[channel] = value
                elif p.ndim == 2 and p.shape[1] == 64 and "embeddings" not in name:
                    p[:, channel] *= 0.01
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model))
    ids, starts = texts_of([60])
    got = bertopt_native.Encoder(tmp_path / "m", isa=isa).run(ids, starts)
    want = reference(model, ids, starts)
    others = ~np.isin(np.arange(64), list(channels))
    assert np.linalg.norm((got - want)[:, others]) < 0.02 * np.linalg.norm(want[:, others])
    again = bertopt_native.Encoder(tmp_path / "m", isa=isa, threads=3).run(np.tile(ids, 3), [0, 60, 120, 180])
    assert (again == np.tile(got, (3, 1))).all()


@pytest.mark.parametrize("k", [1, 15, 16, 33, 384])
def test_float_linear_is_the_same_for_every_row(k: int) -> None:
    rng = np.random.default_rng(k)
    for n in (1, 3, 4, 9):
        x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((21, k), (n, k), (n,)))
        got = bertopt_native.float_linear(x, w, b)
        np.testing.assert_allclose(got, x.astype(np.float64) @ w.T + b, atol=1e-4)
        assert all((bertopt_native.float_linear(x[i : i + 1], w, b)[0] == got[i]).all() for i in range(21))
    with pytest.raises(ValueError, match="for k"):
        bertopt_native.float_linear(np.zeros((2, 3), np.float32), np.zeros((2, 4), np.float32), np.zeros(2, np.float32))


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, -1.0, 1.00390625, 1.01171875, 3.3895314e38, 1e-40, 0.0], np.float32)
    back = (quantize.to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    assert back[2] == 1.0 and back[3] == np.float32(1.015625)
    assert (np.abs(back - values) <= np.abs(values) * 2.0**-8 + 1e-41).all()


def test_int8_weights() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((300, 64)).astype(np.float32)
    w[7] = 0
    q, scale = quantize.to_int8(w)
    assert q.min() >= -127 and (q[7] == 0).all() and (scale > 0).all()
    assert np.abs(q * scale[:, None] - w).max() < 0.35 * np.abs(w).max()
