"""The head of a masked language model, and SPLADE's weights, against transformers' own network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from bertopt_native import Encoder, Unsupported, families
from conftest import ISAS, cosines, network, reference, state, texts_of
from test_families import KINDS, LENGTHS

Packed = Callable[..., Path]

# As for hidden states (`test_families`), but the head adds two products and a norm: mean and least cosine.
BF16_LIMITS, INT8_LIMITS = (0.9999, 0.999), (0.9995, 0.998)
WITH_HEAD = [kind for kind in KINDS if families.FAMILIES[kind].head]
# Their residual stream is never normalised: the errors of all layers add up.
UNNORMALISED, INT8_OF_UNNORMALISED = ("modernbert", "eurobert", "esm"), (0.9992, 0.993)


def check(model: Any, path: Path, precision: Any, isa: str, mean: float, least: float, keep: Any = ()) -> None:
    bertopt_native.pack(path, model.config.to_dict(), state(model), precision, keep, vocabulary_head=True)
    encoder = Encoder(path, threads=2, isa=isa)
    ids, starts = texts_of([min(n, encoder.info["longest_text"]) for n in LENGTHS], model.config.vocab_size)
    types = np.random.default_rng(2).integers(0, 2, len(ids)).astype(np.int32) if encoder.info["token_types"] > 1 else None
    got, want = encoder.run(ids, starts, types, output="logits"), reference(model, ids, starts, types, "logits")
    assert got.shape == want.shape == (len(ids), model.config.vocab_size)
    near = cosines(got, want)
    assert near.mean() >= mean and near.min() >= least, (near.mean(), near.min())
    sizes = np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert np.abs(sizes - 1).max() < 0.05  # a cosine sees no scale
    weights = encoder.run(ids, starts, types, output="splade")
    for text, (a, b) in enumerate(pairwise(starts)):
        np.testing.assert_allclose(weights[text], np.log1p(np.maximum(got[a:b].max(0), 0)), rtol=4e-7)
    np.testing.assert_allclose(encoder.run(ids, starts, types, output="splade_log1p"), np.log1p(weights), rtol=4e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", WITH_HEAD)
def test_bf16(kind: str, isa: str, tmp_path: Path) -> None:
    check(network(kind, head=True), tmp_path / "m", "bf16", isa, *BF16_LIMITS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", WITH_HEAD)
def test_int8(kind: str, isa: str, tmp_path: Path) -> None:
    check(network(kind, head=True), tmp_path / "m", "int8", isa, *(INT8_OF_UNNORMALISED if kind in UNNORMALISED else INT8_LIMITS))


@pytest.mark.parametrize("options", [
    {"vocab_size": 320},  # whole panels
    {"vocab_size": 4103},  # several parts
    {"hidden_size": 384, "num_attention_heads": 12, "vocab_size": 1000, "num_hidden_layers": 1},
    {"hidden_act": "gelu_new"},
    {"layer_norm_eps": 1e-3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("isa", ISAS)
def test_shapes(options: dict[str, Any], isa: str, tmp_path: Path) -> None:
    model = network("bert", head=True, **options)
    check(model, tmp_path / "m", "bf16", isa, *BF16_LIMITS)
    check(model, tmp_path / "m", "int8", isa, *INT8_LIMITS)


@pytest.mark.parametrize("options", [{"classifier_bias": True, "norm_bias": True}, {"decoder_bias": False}, {"classifier_activation": "silu"}], ids=str)
def test_options_of_modernbert(options: dict[str, Any], tmp_path: Path) -> None:
    check(network("modernbert", head=True, **options), tmp_path / "m", "bf16", ISAS[0], *BF16_LIMITS)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "albert", "mpnet", "nomic_bert", "deberta-v2", "deberta", "gte", "data2vec-text", "rembert", "megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm"])
def test_the_activation_is_the_heads_own(kind: str, tmp_path: Path) -> None:
    """Some heads have the layers' activation, others GELU whatever the layers have."""
    check(network(kind, head=True, hidden_act="relu"), tmp_path / "m", "bf16", ISAS[0], *BF16_LIMITS)


def test_a_head_of_another_width_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    model = network("rembert", head=True, output_embedding_size=64)
    with pytest.raises(Unsupported, match="must be as wide as the embeddings, 96; got output_embedding_size 64: use another runtime"):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), vocabulary_head=True)
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model))


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_a_head_that_reads_the_embeddings(kind: str, tmp_path: Path) -> None:
    """DeBERTa's own, `legacy: false`, has no decoder."""
    for precision, limits in (("bf16", BF16_LIMITS), ("int8", INT8_LIMITS)):
        check(network(kind, head=True, legacy=False), tmp_path / "m", precision, ISAS[0], *limits)


def test_a_head_of_its_own_weights(tmp_path: Path) -> None:
    """One that is not tied to the embeddings."""
    check(network("bert", head=True, tie_word_embeddings=False), tmp_path / "m", "bf16", ISAS[0], *BF16_LIMITS)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("output", ["logits", "splade", "splade_log1p"])
def test_a_text_is_the_same_alone_and_among_others(packed: Packed, output: Any, precision: str, isa: str) -> None:
    path = packed("bert", precision, head=True, vocab_size=2500)
    one, several = (Encoder(path, threads=threads, isa=isa) for threads in (1, 3))
    ids, starts = texts_of([5, 0, 1, 33, 64, 12, 2, 78, 31, 32, 7, 7, 9, 40, 60, 70, 3])
    whole = several.run(ids, starts, output=output)
    assert (whole == one.run(ids, starts, output=output)).all()
    for text, (a, b) in enumerate(pairwise(starts)):
        rows = whole[a:b] if output == "logits" else whole[text : text + 1]
        for encoder in (one, several):
            assert (encoder.run(ids[a:b], [0, b - a], output=output) == rows).all()


@pytest.mark.parametrize("isa", ISAS)
def test_empty_texts_and_length_1(packed: Packed, isa: str) -> None:
    encoder = Encoder(packed("bert", head=True), threads=2, isa=isa)
    ids, starts = texts_of([0, 4, 0, 3])
    weights, unit = (encoder.run(ids, starts, output="splade", normalize=normalize) for normalize in (False, True))
    assert not weights[[0, 2]].any() and weights[[1, 3]].any(axis=1).all()
    np.testing.assert_allclose(unit[[1, 3]], weights[[1, 3]] / np.linalg.norm(weights[[1, 3]], axis=1, keepdims=True), rtol=1e-6)
    assert not unit[[0, 2]].any()
    assert encoder.run([], [0], output="splade").shape == (0, 300) == encoder.run([], [0], output="logits").shape


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number_is_no_weight_of_zero(isa: str, tmp_path: Path) -> None:
    """Finite weights whose sums overflow: a caller that looks for NaN must find it."""
    model = network("bert", head=True)
    tensors = {name: values.copy() for name, values in state(model).items()}
    tensors["bert.embeddings.word_embeddings.weight"][7] = 3e38
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), tensors, "bf16", vocabulary_head=True)
    encoder = Encoder(tmp_path / "m", threads=1, isa=isa)
    for output in ("logits", "splade", "splade_log1p"):
        assert np.isnan(encoder.run([5, 7, 9], [0, 3], output=output)).any(axis=1).all(), output  # type: ignore[arg-type]


def test_hidden_states_are_those_of_a_file_without_a_head(packed: Packed) -> None:
    ids, starts = texts_of(LENGTHS)
    model = network("bert", head=True)
    path = packed("bert", head=True)
    plain = path.with_name("plain.bin")
    bertopt_native.pack(plain, model.config.to_dict(), state(model))
    assert (Encoder(path).run(ids, starts) == Encoder(plain).run(ids, starts)).all()
    assert Encoder(plain).info["head_products"] == 0 and Encoder(plain).info["layout_version"] == 1
    info = Encoder(path).info
    assert (info["head_products"], info["products"], info["int8_products"], info["layout_version"]) == (2, 14, 14, 4)


@pytest.mark.parametrize(("keep", "int8"), [(("head",), 12), (("head.decoder",), 13), (("head.dense", "0"), 9)], ids=str)
def test_products_that_stay_in_bf16(packed: Packed, keep: tuple[str, ...], int8: int) -> None:
    assert Encoder(packed("bert", keep=keep, head=True)).info["int8_products"] == int8


def test_errors(packed: Packed, tmp_path: Path) -> None:
    without = Encoder(packed("bert"))
    for output in ("logits", "splade", "splade_log1p"):
        with pytest.raises(ValueError, match="no head over the vocabulary: pack with vocabulary_head=True"):
            without.run([5], [0, 1], output=output)
    with pytest.raises(ValueError, match="one row per text; got output='logits'"):
        Encoder(packed("bert", head=True)).run([5], [0, 1], output="logits", normalize=True)
    model = network("bert")
    with pytest.raises(Unsupported, match=r"a tensor 'cls.predictions.decoder.weight'; the checkpoint has none"):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), vocabulary_head=True)
    with pytest.raises(ValueError, match="keep_bf16 must have layers"):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), keep_bf16=("head",))


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "cls.predictions.transform.dense.weight",
                                  "cls.predictions.transform.LayerNorm.bias"])  # fmt: skip
def test_comparison_sees_another_head(packed: Packed, name: str, precision: str) -> None:
    model, path = network("bert", head=True), packed("bert", precision, head=True)
    tensors = {key: value.copy() for key, value in state(model).items()}
    whole, difference = bertopt_native.compare(path, model.config.to_dict(), tensors, vocabulary_head=True)
    assert difference is None and whole == bertopt_native.compare(path, model.config.to_dict(), tensors, vocabulary_head=True)[0]
    tensors[name].reshape(-1)[3] += 1
    assert "is not the checkpoint's" in str(bertopt_native.compare(path, model.config.to_dict(), tensors, vocabulary_head=True)[1])
    assert "vocabulary_head is 2, the checkpoint's 0" in str(bertopt_native.compare(path, model.config.to_dict(), tensors)[1])


def test_a_head_with_two_dense_layers_is_unsupported(tmp_path: Path) -> None:
    model = network("ultrabert", head=True)
    with pytest.raises(Unsupported, match="no head over the vocabulary of ultrabert's form"):
        bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model), vocabulary_head=True)
    bertopt_native.pack(tmp_path / "m", model.config.to_dict(), state(model))
