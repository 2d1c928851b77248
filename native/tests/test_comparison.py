"""A packed file is compared with its checkpoint: right ones agree, one wrong number does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from bertopt_native import layout, rotary
from bertopt_native.layout import Part, Tensor
from conftest import network, state

KINDS = ("bert", "roberta", "distilbert", "electra", "albert", "mpnet", "nomic_bert", "gte", "modernbert", "eurobert", "deberta-v2",
         "ernie", "data2vec-text", "rembert", "megatron-bert", "xlm-roberta-xl", "ultrabert", "deberta", "roformer", "esm",
         "roberta-prelayernorm")  # fmt: skip


def packed(tmp_path: Path, kind: str = "bert", precision: Any = "int8", keep: Any = (), far: bool = False) -> tuple[Path, Any, Any]:
    model = network(kind)
    config, tensors = model.config.to_dict(), state(model)
    if far:
        name = "encoder.layer.1.output.dense.weight"
        tensors = {**tensors, name: tensors[name].copy()}
        tensors[name][3, 7] = 40.0
    bertopt_native.pack(tmp_path / "m.bin", config, tensors, precision, keep)
    return tmp_path / "m.bin", config, tensors


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_agrees_with_its_checkpoint(kind: str, precision: str, tmp_path: Path) -> None:
    compared, difference = bertopt_native.compare(*packed(tmp_path, kind, precision))
    assert difference is None and compared > 20


def test_products_left_in_bf16_and_copies_of_neurons_agree(tmp_path: Path) -> None:
    assert bertopt_native.compare(*packed(tmp_path, keep=[0, "2.ffn_out"]))[1] is None
    path, config, tensors = packed(tmp_path, far=True)
    assert layout.read(path)[0].intermediate > 160 and bertopt_native.compare(path, config, tensors)[1] is None


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.LayerNorm.bias", "encoder.layer.2.attention.self.key.weight",
                                  "encoder.layer.0.intermediate.dense.bias", "encoder.layer.1.output.dense.weight"])  # fmt: skip
def test_another_checkpoint_differs(name: str, precision: str, tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path, precision=precision)
    other = tensors[name].copy()
    other[(5,) * other.ndim] += 0.1 * np.abs(other).max()
    _, difference = bertopt_native.compare(path, config, {**tensors, name: other})
    assert difference is not None and "is not the checkpoint's" in difference


@pytest.mark.parametrize("name", ["embeddings.task_type_embeddings.weight", "embeddings.token_type_embeddings.weight"])
def test_another_type_of_task_differs(name: str, tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path, "ernie")
    other = tensors[name].copy()
    other[0, 5] += 0.01
    assert "TOKEN_TYPE of layer 0 is not the checkpoint's" in str(bertopt_native.compare(path, config, {**tensors, name: other})[1])
    assert "TOKEN_TYPE of layer 0 is not the checkpoint's" in str(bertopt_native.compare(path, {**config, "use_task_id": False}, tensors)[1])


@pytest.mark.parametrize(("change", "said"), [({"layer_norm_eps": 1e-5}, "file's epsilon is"), ({"hidden_act": "relu"}, "file's activation is"),
                                              ({"num_attention_heads": 4}, "file's heads is")])  # fmt: skip
def test_another_configuration_differs(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path)
    assert said in str(bertopt_native.compare(path, {**config, **change}, tensors)[1])


@pytest.mark.parametrize(("tensor", "layer", "change"), [
    (Tensor.QKV, 1, 3), (Tensor.FFN_OUT + Part.SCALE, 0, 1.02), (Tensor.FFN_IN + Part.SUM, 2, 1.5), (Tensor.ATTENTION_OUT + Part.BIAS, 0, 1.01),
])  # fmt: skip
def test_one_wrong_number_differs(tensor: int, layer: int, change: float, tmp_path: Path) -> None:
    """A step of INT8 but one, a scale, a sum or a bias."""
    path, config, tensors = packed(tmp_path)
    stored = layout.read(path)[1][tensor, layer]
    whole = bytearray(path.read_bytes())
    at = whole.find(stored.data.tobytes())
    data = stored.data.copy()
    place = int(np.argmin(np.abs(data))) if data.dtype == np.int8 else int(np.argmax(np.abs(data)))
    data[place] = data[place] + change if data.dtype == np.int8 else data[place] * change
    whole[at : at + data.nbytes] = data.tobytes()
    path.write_bytes(whole)
    assert bertopt_native.compare(path, config, tensors)[1] is not None


@pytest.mark.parametrize("name", ["encoder.rel_embeddings.weight", "encoder.LayerNorm.bias"])
def test_another_table_by_distance_differs(name: str, tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path, "deberta-v2")
    other = tensors[name].copy()
    other[(5,) * other.ndim] += 0.01 * np.abs(other).max()
    assert "DISTANCE_KEYS of layer 0 is not the checkpoint's" in str(bertopt_native.compare(path, config, {**tensors, name: other})[1])


def test_a_channel_without_weights_is_not_half_a_step_off(tmp_path: Path) -> None:
    """Zeros get the scale 1, of which every small weight is within half a step."""
    path, config, tensors = packed(tmp_path)
    name = "encoder.layer.1.attention.self.value.weight"
    wrong = tensors[name].copy()
    wrong[: len(wrong) // 2] = 0
    bertopt_native.pack(path, config, {**tensors, name: wrong}, "int8")
    assert bertopt_native.compare(path, config, tensors)[1] is not None
    assert bertopt_native.compare(path, config, {**tensors, name: wrong})[1] is None


def test_a_file_of_another_layout_or_cut_short_is_refused(tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path)
    whole = path.read_bytes()
    for damaged in (whole[:-64], whole[:8] + b"\x06\0\0\0" + whole[12:], b"", b"something else" * 40):
        path.write_bytes(damaged)
        with pytest.raises(bertopt_native.BadFile):
            bertopt_native.compare(path, config, tensors)


@pytest.mark.parametrize(("field", "value"), [(2, 9), (3, 7), (4, 2**31), (6, 2**40), (7, 2**40), (7, 3), (7, 64)])
def test_a_damaged_table_is_refused(field: int, value: int, tmp_path: Path) -> None:
    path = packed(tmp_path)[0]
    whole = bytearray(path.read_bytes())
    entry = list(layout.ENTRY.unpack_from(whole, layout.HEADER.size))
    entry[field] = value
    layout.ENTRY.pack_into(whole, layout.HEADER.size, *entry)
    path.write_bytes(whole)
    with pytest.raises(bertopt_native.BadFile, match="is damaged: tensor 0 of layer"):
        layout.read(path)


@pytest.mark.parametrize("part", [Part.SCALE, Part.SUM, Part.BIAS])
def test_a_product_whose_vectors_are_of_another_length_differs(part: Part, tmp_path: Path) -> None:
    path, config, tensors = packed(tmp_path)
    whole = bytearray(path.read_bytes())
    count = len(layout.read(path)[1])
    for at in range(layout.HEADER.size, layout.HEADER.size + count * layout.ENTRY.size, layout.ENTRY.size):
        tensor, layer, kind, rows, cols, reserved, offset, length = layout.ENTRY.unpack_from(whole, at)
        if (tensor, layer) == (Tensor.FFN_IN + part, 0):
            layout.ENTRY.pack_into(whole, at, tensor, layer, kind, rows, cols - 32, reserved, offset, length - 128)
    path.write_bytes(whole)
    assert "FFN_IN of layer 0 is not the checkpoint's" in str(bertopt_native.compare(path, config, tensors)[1])


@pytest.mark.parametrize(("digits", "same"), [(1, True), (16, False)])
def test_another_cpu_turns_by_angles_of_another_last_digit(digits: int, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config, tensors = packed(tmp_path, "modernbert")
    here = rotary.angles
    monkeypatch.setattr(rotary, "angles", lambda config: tuple(a * np.float32(1 + digits * 2**-23) for a in here(config)))
    difference = bertopt_native.compare(path, config, tensors)[1]
    assert (difference is None) == same, difference
