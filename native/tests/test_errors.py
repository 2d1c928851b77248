"""What is refused, and with which words."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from bertopt_native import BadFile, Encoder, Unsupported, layout
from conftest import network, state

Packed = Callable[..., Path]


@pytest.fixture(scope="module")
def encoder(packed: Packed) -> Encoder:
    return Encoder(packed(), threads=2)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"ids": [300]}, "ids must be from 0 to 299; token 0 has 300"),
    ({"ids": [5, -1], "starts": [0, 2]}, "ids must be from 0 to 299; token 1 has -1"),
    ({"ids": [2**31]}, "ids must fit int32"),
    ({"ids": [-(2**40)]}, "ids must fit int32"),
    ({"ids": [1.5]}, "ids must be whole numbers; got float64"),
    ({"ids": [[1]]}, "ids must have one dimension"),
    ({"token_types": [2]}, "token_types must be from 0 to 1; token 0 has 2"),
    ({"token_types": [0, 0]}, "token_types must be as many as ids, 1; got 2"),
    ({"positions": [80]}, "positions must be from 0 to 79; token 0 has 80"),
    ({"positions": [-1]}, "positions must be from 0 to 79; token 0 has -1"),
    ({"positions": []}, "positions must be as many as ids, 1; got 0"),
    ({"starts": []}, "starts must have one entry more than there are texts"),
    ({"starts": [1, 1]}, "starts must begin with 0; got 1"),
    ({"starts": [0]}, "starts must end with the number of ids, 1; got 0"),
    ({"starts": [0, 2]}, "starts must end with the number of ids, 1; got 2"),
    ({"starts": [0, 2, 1]}, "starts must not decrease; got 2, 1 for text 1"),
    ({"starts": [0, 2**62]}, "a text has at most 80 tokens; text 0 has 4611686018427387904"),
    ({"starts": [0, -(2**63), 1]}, "starts must not decrease"),
    ({"ids": [1] * 81, "starts": [0, 81]}, "a text has at most 80 tokens; text 0 has 81: truncate it"),
    ({"output": "cls"}, "output must be one of 'tokens', 'first', 'mean', 'max', 'logits', 'splade', 'splade_log1p'; got 'cls'"),
    ({"normalize": True}, "normalize needs an output of one row per text"),
], ids=str)  # fmt: skip
def test_bad_input(arguments: dict[str, Any], message: str, encoder: Encoder) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        encoder.run(**({"ids": [1], "starts": [0, 1]} | arguments))
    assert encoder.run([1], [0, 1]).shape == (1, 64)


def test_empty(encoder: Encoder) -> None:
    assert encoder.run([], [0]).shape == (0, 64)
    assert encoder.run([], [0], output="mean").shape == (0, 64)
    assert (encoder.run([], [0, 0, 0], output="first", normalize=True) == np.zeros((2, 64))).all()
    one = encoder.run([5, 6], [0, 2], output="mean", normalize=True)[0]
    for output in ("mean", "first", "max"):
        one = encoder.run([5, 6], [0, 2], output=output)[0]
        got = encoder.run([5, 6, 5, 6, 7], [0, 0, 0, 2, 2, 4, 5, 5], output=output)
        assert (got[[2, 4]] == one).all() and (got[[0, 1, 3, 6]] == 0).all() and (got[5] != 0).any()


def test_many_empty_texts(encoder: Encoder) -> None:
    out = encoder.run([5], np.append(np.zeros(100_000, np.int64), 1), output="mean")
    assert out.shape == (100_000, 64) and (out[:-1] == 0).all() and (out[-1] != 0).any()


def test_views_and_other_integers(encoder: Encoder) -> None:
    want = encoder.run([1, 2, 3], [0, 3])
    for dtype in (np.int8, np.uint8, np.int16, np.int64, np.uint64):
        assert (encoder.run(np.array([1, 2, 3], dtype), np.array([0, 3], dtype)) == want).all()
    assert (encoder.run(np.array([3, 0, 2, 0, 1, 0], np.int32)[-2::-2], [0, 3]) == want).all()


def damaged(packed: Packed, tmp_path: Path, change: Callable[[bytearray], Any]) -> Path:
    raw = bytearray(packed().read_bytes())
    changed = change(raw)
    raw = raw if changed is None else changed
    (tmp_path / "m").write_bytes(raw)
    return tmp_path / "m"


def test_cut_files(packed: Packed, tmp_path: Path) -> None:
    size = packed().stat().st_size
    for keep in (0, 1, 8, 255, 256, 300, 5000, size // 2, size - 64, size - 1):
        with pytest.raises(BadFile, match="bytes"):
            Encoder(damaged(packed, tmp_path, lambda raw, keep=keep: raw[:keep]))
    with pytest.raises(BadFile, match="cannot open"):
        Encoder(tmp_path / "nothing")
    with pytest.raises(BadFile, match="regular file"):
        Encoder(tmp_path)


def test_other_magic_and_version(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="first bytes"):
        Encoder(damaged(packed, tmp_path, lambda raw: raw.__setitem__(0, 0)))
    with pytest.raises(BadFile, match="layout version must be from 1 to 5; the file has 6: pack the checkpoint again"):
        Encoder(damaged(packed, tmp_path, lambda raw: raw.__setitem__(8, layout.LAYOUT_VERSION + 1)))


@pytest.mark.parametrize(("kind", "head"), [("bert", False), ("deberta-v2", False), ("bert", True)])
def test_every_word_of_header_and_table(kind: str, head: bool, packed: Packed, tmp_path: Path) -> None:
    """Whatever a word says, the file is refused or runs: nothing outside it is read."""
    good = packed(kind, head=head).read_bytes()
    entries = struct.unpack_from("<I", good, 32)[0]
    words = [*range(0, 152, 4), *range(256, 256 + min(entries, 30) * layout.ENTRY.size, 4)]
    refused = 0
    for at in words:
        for value in (0, 1, 31, 33, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1):
            raw = bytearray(good)
            struct.pack_into("<I", raw, at, value)
            (tmp_path / "m").write_bytes(raw)
            try:
                encoder = Encoder(tmp_path / "m")
            except BadFile:
                refused += 1
                continue
            longest = encoder.info["longest_text"]
            try:
                encoder.run([1] * min(40, longest), [0, min(40, longest)], output="splade" if encoder.info["head_products"] else "tokens")
            except ValueError as e:
                assert "must be from 0 to" in str(e)
    assert refused > len(words) * 4


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"model_type": "gpt2"}, Unsupported, "model_type must be one of"),
    ({"hidden_act": "mish"}, Unsupported, "activation must be one of"),
    ({"position_embedding_type": "relative_key"}, Unsupported, "position_embedding_type must be 'absolute'"),
    ({"is_decoder": True}, Unsupported, "config has is_decoder"),
    ({"num_hidden_layers": 4}, ValueError, "expected a tensor 'encoder.layer.3.attention.self.query.weight'"),
    ({"intermediate_size": 192}, ValueError, r"must have shape \[192, 64\]; got \[160, 64\]"),
    ({"num_attention_heads": 3}, ValueError, "multiple of the number of heads"),
    ({"num_attention_heads": None}, ValueError, "must have num_attention_heads"),
    ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers must be a whole number above 0; got 0"),
], ids=str)  # fmt: skip
def test_pack_refuses_networks(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = network("bert")
    with pytest.raises(error, match=message):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict() | change, state(model))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}}, Unsupported, "rope_type must be 'default'; got 'dynamic'"),
    ({"rope_parameters": None}, Unsupported, "rope_type must be 'default'; got None"),
    ({"rope_parameters": {"rope_type": "default"}}, ValueError, "rope_theta must be a number above 1; got None"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, Unsupported, "partial_rotary_factor must be 1"),
    ({"head_dim": 16}, Unsupported, "head size must be even and hidden size / heads, 32; got 16"),
    ({"max_position_embeddings": None}, ValueError, "config must have max_position_embeddings"),
], ids=str)  # fmt: skip
def test_pack_refuses_rotary_positions(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = network("nomic_bert")
    with pytest.raises(error, match=message):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict() | change, state(model))


def test_only_networks_that_need_it_have_the_newest_layout(packed: Packed) -> None:
    """An older library opens the others."""
    assert [Encoder(packed(kind)).info["layout_version"] for kind in ("bert", "nomic_bert", "deberta-v2")] == [1, 2, 3]
    assert Encoder(packed("bert", head=True)).info["layout_version"] == 4
    assert Encoder(packed("esm")).info["layout_version"] == layout.LAYOUT_VERSION == 5
    info = Encoder(packed("roberta-prelayernorm")).info
    assert (info["layout_version"], info["family"]) == (layout.LAYOUT_VERSION, "roberta-prelayer") == (5, "roberta-prelayer")


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"pos_att_type": ["c2p"]}, Unsupported, r"pos_att_type must be c2p and p2c; got \['c2p'\]"),
    ({"pos_att_type": None}, Unsupported, "pos_att_type must be c2p and p2c; got None"),
    ({"relative_attention": False}, Unsupported, "relative_attention must be true; got False"),
    ({"embedding_size": 32}, Unsupported, "embedding_size must be 64; got 32"),
    ({"attention_head_size": 16}, Unsupported, "attention_head_size must be 32; got 16"),
    ({"conv_kernel_size": 3}, Unsupported, "conv_kernel_size must be 0; got 3"),
    ({"position_buckets": 80}, Unsupported, "neighbouring distances into neighbouring buckets; got 80 for 80"),
    ({"max_relative_positions": 5}, Unsupported, "max_relative_positions must be above half of position_buckets, 4; got 5"),
    ({"position_buckets": 16}, ValueError, r"must have shape \[32, 64\]; got \[16, 64\]"),
    ({"share_att_key": False}, ValueError, "expected a tensor 'encoder.layer.0.attention.self.pos_key_proj.weight'"),
    ({"max_position_embeddings": None}, ValueError, "config must have max_position_embeddings"),
], ids=str)  # fmt: skip
def test_pack_refuses_relative_positions(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = network("deberta-v2")
    with pytest.raises(error, match=message):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict() | change, state(model))


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"pos_att_type": "c2p"}, Unsupported, r"pos_att_type must be c2p and p2c; got \['c2p'\]"),
    ({"pos_att_type": "c2p|p2c|p2p"}, Unsupported, r"pos_att_type must be c2p and p2c; got \['c2p', 'p2c', 'p2p'\]"),
    ({"pos_att_type": "c2p|p2c|p2c"}, Unsupported, r"pos_att_type must be c2p and p2c; got \['c2p', 'p2c', 'p2c'\]"),
    ({"talking_head": True}, Unsupported, "talking_head must be false; got True"),
    ({"relative_attention": False}, Unsupported, "relative_attention must be true; got False"),
    ({"embedding_size": 32}, Unsupported, "embedding_size must be 64; got 32"),
    ({"max_relative_positions": 16}, ValueError, r"must have shape \[32, 64\]; got \[160, 64\]"),
    ({"num_hidden_layers": 4}, ValueError, r"expected a tensor 'encoder.layer.3.attention.self.in_proj.weight'"),
], ids=str)  # fmt: skip
def test_pack_refuses_the_first_deberta(change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    model = network("deberta")
    with pytest.raises(error, match=message):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict() | change, state(model))


@pytest.mark.parametrize("rows", [(5, 4), (3, 5), (16, 17), (2**31, 2**31)])
def test_rows_by_distance_that_leave_the_table_or_jump_are_refused(rows: tuple[int, int], packed: Packed, tmp_path: Path) -> None:
    whole = bytearray(packed("deberta-v2").read_bytes())
    stored = layout.read(packed("deberta-v2"))[1][layout.Tensor.PLACES, 0]
    data = stored.data.copy()
    data[-2:] = rows
    at = whole.find(stored.data.tobytes())
    whole[at : at + data.nbytes] = data.tobytes()
    (tmp_path / "m").write_bytes(whole)
    with pytest.raises(BadFile, match="by distance must be the one before"):
        Encoder(tmp_path / "m")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pack_refuses_weights_that_are_not_finite(value: float, tmp_path: Path) -> None:
    model = network("bert")
    for name in (
        "embeddings.word_embeddings.weight",
        "encoder.layer.1.output.dense.weight",
        "encoder.layer.2.output.LayerNorm.bias",
    ):
        tensors = {k: v.copy() for k, v in state(model).items()}
        tensors[name].flat[-1] = value
        with pytest.raises(ValueError, match=f"{name}' has NaN or infinite values"):
            bertopt_native.pack(tmp_path / "m", model.config.to_dict(), tensors)


def test_pack_refuses_options(tmp_path: Path) -> None:
    model = network("bert")
    for options, message in (({"precision": "int4"}, "precision must be one of"), ({"keep_bf16": [3]}, "keep_bf16 must have layers from 0 to 2"),
                             ({"keep_bf16": ["0.query"]}, "keep_bf16"), ({"keep_bf16": [True]}, "keep_bf16")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), **options)
    with pytest.raises(Unsupported, match="hidden size must be a multiple of 32; got 48"):
        odd = network("bert", hidden_size=48)
        bertopt_native.pack(tmp_path / "m", odd.config.to_dict(), state(odd))


@pytest.mark.parametrize(("options", "message"), [
    ({"intermediate_size": 65_600}, "intermediate size must be at most 65536; got 65600"),
    ({"hidden_size": 2_080, "num_attention_heads": 2_080, "intermediate_size": 32}, "heads times head size, padded, must be at most 65536; got 66560"),
], ids=["intermediate size", "heads"])  # fmt: skip
def test_pack_refuses_what_the_encoder_would_not_open(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = network("bert", **({"hidden_size": 32, "num_attention_heads": 1, "num_hidden_layers": 1} | options))
    with pytest.raises(Unsupported, match=message):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), "bf16")


def test_threads() -> None:
    for threads in (0, -1, 5000):
        with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
            Encoder("anything", threads=threads)
