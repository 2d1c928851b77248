"""Neurons with a weight far beyond the others of its row: who is copied, and that the layer computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from bertopt_native import layout, packing, quantize
from bertopt_native.packing import _copies, _divided
from conftest import ISAS, cosines, network, reference, state, texts_of


def even(rows: int = 64, cols: int = 96, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (rows, cols)).astype(np.float32)


def test_nobody_is_copied_among_equals() -> None:
    assert len(_copies(even())) == 0
    assert len(_copies(np.zeros((32, 64), np.float32))) == 0


@pytest.mark.parametrize(("factor", "times"), [(9, 1), (15, 2), (25, 3), (31.5, 4), (1e6, 4)])
def test_a_far_neuron_is_there_as_often_as_it_is_far(factor: float, times: int) -> None:
    """A row of 1,024 with one weight `factor` times the root mean square of its row, up to 4 in all."""
    weight = np.full((32, 1024), 0.5, np.float32)
    share = factor**2 / 1024  # of its row's sum of squares; at most all of it, at 32 times the root mean square
    weight[3, 17] = 0.5 * factor * np.sqrt((1 - 1 / 1024) / (1 - share)) if share < 1 else 1e6
    assert weight[3, 17] / np.sqrt((weight[3] ** 2).mean()) == pytest.approx(min(factor, 32), rel=1e-3)
    assert _copies(weight).tolist() == [17] * (times - 1)


def test_there_are_at_most_a_panel_of_copies_the_farthest_first() -> None:
    weight = even(64, 4096)
    far = np.arange(60)
    weight[far, far * 7] = np.linspace(40, 20, 60)
    chosen = _copies(weight)
    assert len(chosen) == layout.PANEL
    assert set(chosen) < set(far * 7) and chosen[0] == 0 and np.isin(chosen, far[: layout.PANEL] * 7).all()


def test_divided_products_compute_the_same() -> None:
    rng = np.random.default_rng(1)
    ffn_in = even(96, 64, 2), rng.standard_normal(96).astype(np.float32)
    ffn_out, copies = even(64, 96, 3), np.array([5, 5, 5, 90])
    (weight, bias), out = _divided(ffn_in, ffn_out, copies)
    assert weight.shape == (100, 64) and bias.shape == (100,) and out.shape == (64, 100)
    x = rng.standard_normal((7, 64))
    want = np.maximum(x @ ffn_in[0].T + ffn_in[1], 0) @ ffn_out.T
    assert np.maximum(x @ weight.T + bias, 0) @ out.T == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert np.allclose(out[:, 5], ffn_out[:, 5] / 4) and np.allclose(out[:, 99], ffn_out[:, 90] / 2)
    untouched = np.delete(np.arange(96), [5, 90])
    assert (out[:, untouched] == ffn_out[:, untouched]).all()


def test_copies_leave_the_other_weights_their_precision() -> None:
    weight = even(32, 1536) * np.float32(0.05)
    weight[:, 11] = 2
    (_, _), divided = _divided((even(1536, 32), np.zeros(1536, np.float32)), weight, _copies(weight))

    def error(w: Any) -> float:
        q, scale = quantize.to_int8(w)
        return float(np.abs(q * scale[:, None] - w)[:, np.delete(np.arange(1536), 11)].mean())

    assert error(divided) < 0.5 * error(weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_a_network_with_a_far_neuron_is_packed_with_copies(precision: Any, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only INT8 has them, and it is nearer to float32 than without."""
    import torch

    model = network("bert")
    tensors = state(model)
    name = "encoder.layer.0.output.dense.weight"
    # Rows of this small network are too short for a weight to be ten times their root mean square.
    monkeypatch.setattr(packing, "_FAR", 3)
    tensors[name] = tensors[name].copy()
    tensors[name][:, 5] *= 30
    model.load_state_dict({**model.state_dict(), name: torch.tensor(tensors[name])})
    ids, starts = texts_of([5, 1, 30, 12])
    want = reference(model, ids, starts)

    def got(file: str) -> Any:
        bertopt_native.pack(tmp_path / file, model.config.to_dict(), tensors, precision)
        return bertopt_native.Encoder(tmp_path / file, threads=1, isa=isa).run(ids, starts)

    with_copies = got("with")
    monkeypatch.setattr(packing, "_MOST_COPIES", 1)
    without = got("without")
    if precision == "bf16":
        assert (with_copies == without).all()
    else:
        assert cosines(with_copies, want).mean() > cosines(without, want).mean() > 0.9
