"""The comparisons with transformers would see an error: each tensor of each family, changed a little, shows."""

from __future__ import annotations

from pathlib import Path

import bertopt_native
import numpy as np
import pytest
from conftest import cosines, network, state, texts_of
from test_families import KINDS, LENGTHS


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_matters(kind: str, tmp_path: Path) -> None:
    model = network(kind)
    tensors = {k: v for k, v in state(model).items() if "pooler" not in k and "contact_head" not in k and not k.endswith(("position_ids", "token_type_ids"))}
    path = tmp_path / "m"
    bertopt_native.pack(path, model.config.to_dict(), tensors, "bf16")
    encoder = bertopt_native.Encoder(path)
    ids, starts = texts_of([min(n, encoder.info["longest_text"]) for n in LENGTHS])
    types = np.arange(len(ids)) % 2 if encoder.info["token_types"] > 1 else None
    want = encoder.run(ids, starts, types)
    for name, values in tensors.items():
        # Softmax does not see the keys' bias: it adds the same to every score of a query.
        if name.endswith((".key.bias", ".k.bias", ".k_lin.bias")):
            continue
        changed = tensors | {name: np.roll(values, 1, 0)}
        if name.endswith("embed_positions.weight"):  # the encoder makes its own
            with pytest.raises(bertopt_native.Unsupported, match="sines and cosines"):
                bertopt_native.pack(path, model.config.to_dict(), changed, "bf16")
            continue
        bertopt_native.pack(path, model.config.to_dict(), changed, "bf16")
        got = bertopt_native.Encoder(path).run(ids, starts, types)
        assert cosines(got, want).mean() < 0.9999, name  # the comparisons ask for 0.99995
