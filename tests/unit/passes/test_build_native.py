"""build_native: every family and task, to the last bit alone and among others, counted, and refused with a remedy."""

from __future__ import annotations

import builtins
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt import stages
from bertopt.checks import invariance, parity, probes
from bertopt.core import Context, Eager, Native, Pass
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint, rounding
from bertopt.modeling.float_head import FILE, FloatHead, plain
from bertopt.passes import BuildNative, UseSdpa
from bertopt.recipe.parser import parse
from bertopt.runtime.load import load
from bertopt.runtime.predictor import Predictor
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.sessions.native import NativeSession
from bertopt.stages import certificates, native_certificate
from bertopt.system import environment
from tests.support.tiny_models import NORM_FIRST_FAMILIES, TASKS, WORDS, Tiny, write_tiny

native = pytest.importorskip("bertopt_native", reason="bertopt-native is not installed: pip install ./native")
pytestmark = pytest.mark.skipif(not native.supported(), reason="this CPU has no AVX2")

TEXTS = [" ".join(WORDS[(7 * i + j * j) % len(WORDS)] for j in range(i % 17)) for i in range(40)]
#: Families and tasks, each at least once; a pooling makes it an embedding model.
MODELS = [
    *(("bert", "feature-extraction", pooling) for pooling in (None, "mean", "cls", "max", "mean_sqrt_len")),
    *((family, "text-classification", None) for family in ("bert", "roberta", "distilbert", "electra", "albert", "mpnet")),
    ("xlm-roberta", "token-classification", None), ("mpnet", "token-classification", None),
    ("distilbert", "question-answering", None), ("roberta", "feature-extraction", "mean"),
    ("nomic_bert", "feature-extraction", "mean"), ("nomic_bert", "text-classification", None), ("gte", "feature-extraction", "cls"),
    ("gte", "text-classification", None), ("gte", "token-classification", None),
    ("modernbert", "feature-extraction", "mean"), ("modernbert", "feature-extraction", "cls"), ("modernbert", "text-classification", None),
    ("modernbert", "token-classification", None), ("modernbert", "question-answering", None),
    ("deberta-v2", "feature-extraction", "mean"), ("deberta-v2", "text-classification", None), ("deberta-v2", "token-classification", None),
    ("deberta-v2", "question-answering", None), ("eurobert", "feature-extraction", "mean"), ("eurobert", "text-classification", None),
    ("eurobert", "token-classification", None),
    *((family, "fill-mask", None) for family in ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "mpnet", "nomic_bert", "gte")),
    *((family, "fill-mask", None) for family in ("modernbert", "deberta-v2", "eurobert")),
    ("deberta", "feature-extraction", "mean"), ("deberta", "text-classification", None), ("deberta", "token-classification", None),
    ("deberta", "question-answering", None), ("deberta", "fill-mask", None), ("deberta", "feature-extraction", "splade"),
    *((family, "feature-extraction", "splade") for family in ("bert", "roberta", "distilbert", "modernbert", "eurobert")),
    ("bert", "feature-extraction", "splade_log1p"),
    *(("ernie", task, None) for task in ("text-classification", "token-classification", "question-answering", "fill-mask")),
    ("ernie", "feature-extraction", "cls"),
    *(("rembert", task, None) for task in ("text-classification", "token-classification", "question-answering")),
    ("rembert", "feature-extraction", "mean"),
    *(("data2vec-text", task, None) for task in ("text-classification", "token-classification", "question-answering", "fill-mask")),
    ("data2vec-text", "feature-extraction", "mean"),
    *((family, task, None) for family in NORM_FIRST_FAMILIES for task in TASKS),
    *((family, "feature-extraction", pooling) for family in NORM_FIRST_FAMILIES for pooling in ("mean", "splade")),
    ("ultrabert", "feature-extraction", "mean"), ("ultrabert", "text-classification", None), ("ultrabert", "token-classification", None),
    ("ultrabert", "question-answering", None),
    *(("roformer", task, None) for task in ("feature-extraction", "text-classification", "token-classification", "question-answering", "fill-mask")),
    ("esm", "feature-extraction", "mean"), ("esm", "text-classification", None), ("esm", "token-classification", None), ("esm", "fill-mask", None),
]  # fmt: skip


def built(reference: Eager, folder: Path, **options: Any) -> Native:
    folder.mkdir(exist_ok=True)
    return BuildNative(**options)(reference, Context(folder)).model


def stage(reference: Eager, folder: Path, **options: Any) -> Path:
    """A committed stage with its tokenizer, as a run leaves it."""
    parent, out = folder / "parent", folder / "stage"
    for directory in (parent, out):
        directory.mkdir(parents=True)
    checkpoint.write_snapshot(reference, parent)
    model = built(reference, out, **options)
    stages.inherit(parent, out)
    stages.write_form(model, out)
    stages.write_manifest(out, {"name": "native", **stages.describe(model)})
    return out


@pytest.mark.parametrize(("family", "task", "pooling"), MODELS)
def test_every_family_and_task_is_close_in_every_padding(family: str, task: str, pooling: str | None, tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(family=family, task=task, pooling=pooling))
    spec = reference.spec
    theirs = open_session(reference, threads=1)
    for precision, limit in (("bf16", 0.999), ("int8", 0.96)):
        session = open_session(built(reference, tmp_path / precision, precision=precision), threads=2)
        compared = 0
        for probe in probes.grid(spec, [(1, 8), (5, 24)], None):
            if not probes.packable(spec, probe):
                continue
            case = parity.compare(probe, spec, parity.answer(session, probe, spec), parity.answer(theirs, probe, spec))
            assert case.finite and case.cosine_mean > limit, (precision, probe.name, case)
            compared += 1
        assert compared >= 5


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("bert", "text-classification"), ("albert", "text-classification"), ("albert", "fill-mask"), ("rembert", "feature-extraction"),
        ("modernbert", "token-classification"), ("eurobert", "fill-mask"), ("deberta-v2", "question-answering"),
    ],
)  # fmt: skip
def test_the_simulated_rounding_costs_what_the_encoder_s_does(family: str, task: str, precision: str, tiny: Tiny, tmp_path: Path) -> None:
    """Simulations that rounded the pooler, classifiers and every operator cost two to ten times as much, and so did wrong models."""
    reference, simulated = (checkpoint.load(tiny(family, task)) for _ in range(2))
    if precision == "int8":
        rounding.simulate(simulated.network, "int8", BuildNative().int8_rounding())
    else:
        rounding.simulate(simulated.network, "bfloat16", BuildNative().half_rounding())
    sessions = [open_session(each, threads=1) for each in (reference, simulated, built(reference, tmp_path / "built", precision=precision))]
    rng, name = np.random.default_rng(5), reference.spec.outputs[0]
    cost = [0.0, 0.0]
    for length in (3, 9, 17, 30):
        inputs = reference.spec.padded_inputs(reference.spec.random_ids((16, length), rng), np.ones((16, length), np.int64))
        expected, *given = (session.run(inputs)[name].astype(float) for session in sessions)
        cost = [total + float(np.square(each - expected).sum()) for total, each in zip(cost, given, strict=True)]
    assert cost[0] > 0 and 0.6 < (cost[1] / cost[0]) ** 0.5 < 1.6


def test_a_classifier_of_modernbert_reads_the_mean_where_its_configuration_says_so(tmp_path: Path) -> None:
    extra = {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", "modernbert", extra=extra))
    model = built(reference, tmp_path / "built", precision="bf16")
    probe = next(probes.grid(reference.spec, [(5, 24)], None))
    answers = [parity.answer(open_session(each, threads=1), probe, reference.spec) for each in (model, reference)]
    assert parity.compare(probe, reference.spec, *answers).cosine_mean > 0.9999
    head = FloatHead.read(model.path.with_name(FILE))
    assert head.pooling == "mean"
    dataclasses.replace(head, steps=head.steps[1:]).write(model.path.with_name(FILE))
    assert certificates.certify(model, reference).status == "contradicted"


@pytest.mark.parametrize("pooling", ["late", "mean", "bos"])
def test_a_classifier_of_eurobert_reads_what_its_configuration_says(pooling: str, tmp_path: Path) -> None:
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", "eurobert", extra={"classifier_pooling": pooling, "num_key_value_heads": 1}))
    model = built(reference, tmp_path / "built", precision="bf16")
    assert FloatHead.read(model.path.with_name(FILE)).pooling == {"bos": "first"}.get(pooling, pooling)
    ours, theirs = open_session(model, threads=2), open_session(reference, threads=1)
    for probe in probes.grid(reference.spec, [(5, 24)], None):
        if probes.packable(reference.spec, probe):
            answers = [parity.answer(each, probe, reference.spec) for each in (ours, theirs)]
            assert parity.compare(probe, reference.spec, *answers).cosine_mean > 0.999, probe.name


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_of_ultrabert_reads_what_its_configuration_says(pooling: str, tmp_path: Path) -> None:
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", "ultrabert", extra={"classifier_pooling": pooling}))
    model = built(reference, tmp_path / "built", precision="bf16")
    head = FloatHead.read(model.path.with_name(FILE))
    assert head.pooling == {"cls": "first"}.get(pooling, pooling)
    assert certificates.certify(model, reference).status == "certified"
    ours, theirs = open_session(model, threads=2), open_session(reference, threads=1)
    for probe in probes.grid(reference.spec, [(5, 24)], None):
        if probes.packable(reference.spec, probe):
            answers = [parity.answer(each, probe, reference.spec) for each in (ours, theirs)]
            assert parity.compare(probe, reference.spec, *answers).cosine_mean > 0.999, probe.name
    other = ("mean", *head.steps) if pooling == "cls" else head.steps[1:]
    dataclasses.replace(head, steps=other).write(model.path.with_name(FILE))
    assert certificates.certify(model, reference).status == "contradicted"


def test_roformers_that_the_encoder_does_not_run_are_unsupported(tmp_path: Path) -> None:
    for number, (extra, why) in enumerate((({"hidden_act": "relu"}, "hidden_act 'gelu'; got 'relu'"), ({"rotary_value": True}, "config has rotary_value"))):
        reference = checkpoint.load(write_tiny(tmp_path / f"checkpoint{number}", "roformer", extra=extra))
        with pytest.raises(Unsupported, match=why):
            built(reference, tmp_path / f"built{number}")


def test_the_head_over_ultraberts_vocabulary_is_unsupported(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no head over the vocabulary of ultrabert's form, with two dense layers"):
        built(checkpoint.load(tiny(family="ultrabert", task="fill-mask")), tmp_path / "built")


def test_a_field_of_modernberts_configuration_means_nothing_in_another_family(tiny: Tiny) -> None:
    network = checkpoint.load(tiny(family="bert")).network
    config, tensors, _ = plain(network)
    head = FloatHead.of(network.spec, tensors, config | {"classifier_pooling": "mean"})
    assert head is not None and head.pooling == "first"


@pytest.mark.parametrize(("family", "field"), [("modernbert", "classifier_activation"), ("deberta-v2", "pooler_hidden_act"), ("deberta", "pooler_hidden_act")])
def test_another_function_in_the_head_is_unsupported(family: str, field: str, tmp_path: Path) -> None:
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", family, extra={field: "relu"}))
    with pytest.raises(Unsupported, match=f"{field} 'gelu'; got 'relu'"):
        built(reference, tmp_path / "built")


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"])
def test_debertas_own_head_over_the_vocabulary(family: str, tmp_path: Path) -> None:
    """`legacy: false`, as microsoft/deberta-base and deberta-v3-base were trained: its decoder is the table of embeddings."""
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", family, "fill-mask", extra={"legacy": False}))
    model = built(reference, tmp_path / "built", precision="bf16")
    assert certificates.certify(model, reference).status == "certified"
    probe = next(probes.grid(reference.spec, [(5, 24)], None))
    answers = [parity.answer(open_session(each, threads=1), probe, reference.spec) for each in (model, reference)]
    assert parity.compare(probe, reference.spec, *answers).cosine_mean > 0.9999


@pytest.mark.parametrize("extra", [{"talking_head": True}, {"pos_att_type": "p2c"}, {"pos_att_type": "c2p|p2c|p2p"}, {"relative_attention": False}], ids=str)
def test_other_kinds_of_the_first_deberta_are_unsupported(extra: dict[str, Any], tmp_path: Path) -> None:
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", "deberta", extra=extra))
    with pytest.raises(Unsupported, match=f"{next(iter(extra))} must be"):
        built(reference, tmp_path / "built")


@pytest.mark.parametrize(("extra", "why"), [
    ({"pos_att_type": ["c2p"]}, r"pos_att_type must be c2p and p2c; got \['c2p'\]"), ({"conv_kernel_size": 3}, "conv_kernel_size must be 0; got 3"),
    ({"position_buckets": 64}, "neighbouring distances into neighbouring buckets; got 64 for 64"),
])  # fmt: skip
def test_other_kinds_of_relative_positions_are_unsupported(extra: dict[str, Any], why: str, tmp_path: Path) -> None:
    reference = checkpoint.load(write_tiny(tmp_path / "checkpoint", "deberta-v2", extra=extra))
    with pytest.raises(Unsupported, match=why):
        built(reference, tmp_path / "built")


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize(("family", "task", "pooling"), MODELS)
def test_what_is_packed_is_certified(family: str, task: str, pooling: str | None, precision: str, tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(family=family, task=task, pooling=pooling))
    build = BuildNative(precision=precision)
    found = certificates.certify(build(reference, Context(tmp_path)).model, reference)
    assert found.status == "certified" and found.weights > 10, found


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["classifier.bias", "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.output.dense.weight"])
def test_a_wrong_weight_contradicts_its_certificate(name: str, precision: str, tiny: Tiny, tmp_path: Path) -> None:
    """A rare token with another's embedding was delivered: in short rows of a classifier it changed little."""
    parent, wrong = checkpoint.load(tiny()), checkpoint.load(tiny())
    tensor = dict(wrong.network.encoder.named_parameters())[name].data
    tensor[1] += 0.05
    build = BuildNative(precision=precision)
    found = certificates.certify(build(wrong, Context(tmp_path)).model, parent)
    assert found.status == "contradicted" and "is not the checkpoint's" in found.reason, found


@pytest.mark.parametrize("precision", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.dense.weight", "cls.predictions.bias"])
def test_a_wrong_head_over_the_vocabulary_contradicts_its_certificate(name: str, precision: str, tiny: Tiny, tmp_path: Path) -> None:
    parent, wrong = (checkpoint.load(tiny(task="feature-extraction", pooling="splade")) for _ in range(2))
    dict(wrong.network.encoder.named_parameters())[name].data[-1] += 0.05
    models = [BuildNative(precision=precision)(each, Context(tmp_path / str(number))).model for number, each in enumerate((wrong, parent)) if (tmp_path / str(number)).mkdir() is None]
    for found in (certificates.certify(models[0], parent), native_certificate.certify_beside(*models)):
        assert found.status == "contradicted", found
    assert native_certificate.certify_beside(models[1], models[1]).status == "certified"


@pytest.mark.parametrize(("task", "pooling"), [("feature-extraction", "splade"), ("fill-mask", None)])
def test_predictions_over_the_vocabulary(task: str, pooling: str | None, tiny: Tiny, tmp_path: Path) -> None:
    """By the predictor, beside the checkpoint's own: packed rows of several texts, and texts alone."""
    reference = checkpoint.load(tiny(task=task, pooling=pooling))
    predictor = load(stage(reference, tmp_path, precision="bf16"), threads=2)
    theirs = Predictor(open_session(reference, threads=1), reference.spec, tmp_path / "parent")
    texts = [f"{text} [MASK]" if task == "fill-mask" else text for text in TEXTS]
    several, alone, expected = predictor(texts), [predictor([text])[0] for text in texts], theirs(texts)
    for ours, single, want in zip(several, alone, expected, strict=True):
        assert ours == single
        if task == "fill-mask":
            assert ours[0][0]["token"] in [found["token"] for found in want[0]][:2]
            continue
        dense, other = (np.zeros(reference.spec.vocabulary) for _ in range(2))
        dense[ours["indices"]], other[want["indices"]] = ours["values"], want["values"]
        assert dense @ other / np.linalg.norm(dense) / np.linalg.norm(other) > 0.999


@pytest.mark.parametrize(("family", "keep", "counts"), [("bert", ("head",), (8, 2)), ("bert", ("head.decoder", "1"), (5, 5)), ("eurobert", (), (9, 0)), ("eurobert", ("head.*",), (8, 1))])
def test_products_of_the_head_are_counted(family: str, keep: tuple[str, ...], counts: tuple[int, int], tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(family=family, task="fill-mask"))
    by = BuildNative(keep_bf16=keep)
    model = by(reference, Context(tmp_path)).model
    shown = by.effects(model, open_session(model).facts())
    assert shown == {what: (count, count) for what, count in zip(("products that run in INT8", "products that run in bf16"), counts, strict=True) if count}
    with pytest.raises(UsageError, match=r"'9' fits none of 2 layers with qkv, .*head\.decoder"):
        built(reference, tmp_path / "other", keep_bf16=("9",))


@pytest.mark.parametrize(("family", "task", "pooling"), MODELS)
def test_a_text_has_the_same_bits_alone_and_among_others(family: str, task: str, pooling: str | None, tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(family=family, task=task, pooling=pooling))
    session = open_session(built(reference, tmp_path), threads=2)
    (tmp_path / "snapshot").mkdir()
    checkpoint.write_snapshot(reference, tmp_path / "snapshot")
    tokenizer = Tokenizer(tmp_path / "snapshot", reference.spec)
    texts = [(text, "on it") if task == "question-answering" else text for text in TEXTS]
    alone = [tokenizer.batch(tokenizer.encode([text])) for text in texts]
    measured = invariance.measure(session, reference.spec, alone, reference.shapes)
    assert measured is not None and measured.max_abs == 0.0, measured


def test_the_predictor_feeds_one_row_without_padding(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    predictor = load(stage(reference, tmp_path), threads=1)
    shapes: list[tuple[int, ...]] = []
    predictor.watched(lambda batch, _: shapes.append(batch.inputs["input_ids"].shape))
    vectors = predictor(TEXTS)
    assert len(shapes) == 1 and shapes[0][0] == 1 and shapes[0][1] == sum(len(t.split()) + 2 for t in TEXTS)
    predictor.watched(None)
    assert all((predictor([text])[0] == vector).all() for text, vector in zip(TEXTS, vectors, strict=True))
    few = load(tmp_path / "stage", threads=2, max_batch_tokens=20)
    few.watched(lambda batch, _: shapes.append(batch.inputs["input_ids"].shape))
    assert (few(TEXTS) == vectors).all()
    assert len(shapes) > 10 and all(shape[0] == 1 and shape[1] <= 20 for shape in shapes[1:])


@pytest.mark.parametrize(("task", "pooling"), [("token-classification", None), ("feature-extraction", "mean")])
def test_a_row_with_gaps_has_zeros_there(task: str, pooling: str | None, tiny: Tiny, tmp_path: Path) -> None:
    model = built(checkpoint.load(tiny(task=task, pooling=pooling)), tmp_path)
    session, outputs = NativeSession(model, "cpu", threads=1), model.spec.outputs[0]
    segments = np.array([[1, 1, 0, 2, 2, 2, 0, 0]])
    row = {"input_ids": np.arange(8)[None] + 5, "token_type_ids": np.zeros((1, 8), np.int64), "position_ids": np.array([[0, 1, 0, 0, 1, 2, 0, 0]]), "segment_ids": segments}
    if pooling:
        row["first_tokens"] = np.array([[0, 3, 0]])  # the third text is none
    given = session.run({name: row[name] for name in model.spec.network_inputs})[outputs]
    assert given.shape[:2] == ((1, 3) if pooling else (1, 8))
    there = np.array([True, True, False]) if pooling else segments[0] != 0
    assert given[0][there].any(axis=-1).all() and not given[0][~there].any()


def test_counts_come_from_the_file_that_was_opened(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    by = BuildNative(keep_bf16=("0", "*.ffn_out"))
    result = by(reference, Context(tmp_path))
    assert result.changes == {"int8_products": 3, "bf16_products": 5}
    facts = open_session(result.model).facts()
    assert by.effects(result.model, facts) == {"products that run in INT8": (3, 3), "products that run in bf16": (5, 5)}
    assert facts.isa in native.supported()
    # A file of another precision than the stage says is seen.
    assert BuildNative().effects(result.model, facts)["products that run in INT8"] == (8, 3)


def test_wrong_patterns_and_orders_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    for pattern in ("9", "0.query", "*.nothing", "x"):
        with pytest.raises(UsageError, match=r"keep_bf16 must name layers from 0 to 1 .* fits none"):
            built(reference, tmp_path / ascii(pattern).replace("*", "s"), keep_bf16=(pattern,))
    with pytest.raises(UsageError, match="put it after reference or use_sdpa"):
        parse("schema_version: 1\nmodel: x\nsteps:\n  - pass: merge_qkv\n  - pass: build_native\n")
    assert built(UseSdpa()(reference, Context(tmp_path)).model, tmp_path / "sdpa").precision == "int8"


class _Own(Pass[Eager, Eager]):
    """What a user's pass may do to a network."""

    def __call__(self, model: Eager, ctx: Context) -> Any:
        return model.rewritten(self)


class FoldsScale(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        for layer in network.base.encoder.layer:
            layer.attention.self.query.weight.mul_(layer.attention.self.scaling)
            layer.attention.self.scaling = 1.0
        return {"layers": 2}


class AddsInAHook(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        bias = network.encoder.classifier.bias.clone()
        network.encoder.classifier.bias.zero_()
        network.encoder.classifier.register_forward_hook(lambda module, inputs, output: output + bias)
        return {"hooks": 1}


class ReplacesAModule(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        network.base.pooler.activation = torch.nn.Identity()
        return {"modules": 1}


class ChangesConfiguration(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        network.encoder.config.hidden_act = "gelu_new"
        return {"fields": 1}


class ReplacesAMethod(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        network.base.create_position_ids = lambda *_: None
        return {"methods": 1}


class RenumbersPositions(_Own):
    """Two positions are stored in each other's place, and a buffer says so."""

    def rewrite(self, network: Any) -> dict[str, int]:
        embeddings, order = network.base.embeddings, torch.arange(network.spec.max_length)
        order[[40, 41]] = order[[41, 40]]
        embeddings.position_embeddings.weight.copy_(embeddings.position_embeddings.weight[order])
        embeddings.position_ids = order[None]
        return {"positions": 2}


class MovesWeights(_Own):
    def rewrite(self, network: Any) -> dict[str, int]:
        network.note = "harmless"
        layer = network.base.encoder.layer[0]
        layer.output.dense.weight.mul_(1.0)
        return {"weights": 1}


@pytest.mark.parametrize(
    ("change", "where"),
    [(FoldsScale, "'encoder.bert.encoder.layer.0.attention.self.scaling'"), (AddsInAHook, "'encoder.classifier._forward_hooks'"),
     (ReplacesAModule, "'encoder.bert.pooler.activation'"), (ChangesConfiguration, "'encoder.config.hidden_act'"),
     (ReplacesAMethod, "'encoder.bert.create_position_ids'"), (RenumbersPositions, "'encoder.bert.embeddings.position_ids'"), (MovesWeights, None)],
)  # fmt: skip
def test_what_a_pass_changes_besides_weights_is_refused(
    change: type[_Own], where: str | None, tiny: Tiny, tmp_path: Path
) -> None:
    """The encoder runs its own code: a scale that was folded into the query was applied twice, and the model delivered. So was one of
    another activation function, which torch's layers no longer read from the configuration, and one whose buffer of positions was in another order."""
    reference = UseSdpa()(checkpoint.load(tiny(task="text-classification")), Context(tmp_path)).model
    with torch.no_grad():
        changed = change()(reference, Context(tmp_path)).model
    if where is None:
        assert built(changed, tmp_path / "out").precision == "int8"
        return
    with pytest.raises(Unsupported, match=f"the native encoder takes weights alone, and {where} is not what .*: .*after reference or use_sdpa"):
        built(changed, tmp_path / "out")


def test_weights_that_are_not_finite_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    with torch.no_grad():
        reference.network.encoder.encoder.layer[1].output.dense.weight[3, 4] = float("nan")  # type: ignore[union-attr,index]
    with pytest.raises(IntegrityError, match=r"encoder.layer.1.output.dense.weight' has NaN or infinite values"):
        built(reference, tmp_path / "nan")


def test_unknown_families_are_unsupported(tiny: Tiny) -> None:
    spec = checkpoint.load(tiny(family="bert")).spec.model_copy(update={"family": "funnel"})
    with pytest.raises(Unsupported, match=r"native encoder runs .*, eurobert, .*; got funnel: use convert_openvino"):
        FloatHead.of(spec, {}, {})


def test_without_the_module_the_install_line_is_given(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    model = built(reference, tmp_path)
    plain = builtins.__import__

    def importing(name: str, *more: Any, **named: Any) -> Any:
        if name == "bertopt_native":
            raise ImportError("No module named 'bertopt_native'")
        return plain(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", importing)
    for action in (lambda: built(reference, tmp_path / "again"), lambda: open_session(model)):
        with pytest.raises(Unsupported, match=r"pip install 'bertopt\[native\]'.*pip install ./native"):
            action()


def test_a_cpu_without_the_instructions_is_unsupported(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    model = built(reference, tmp_path)
    monkeypatch.setenv("BERTOPT_NATIVE_ISA", "avx10")
    with pytest.raises(Unsupported, match=r"must be one of: .*avx2 .*got 'avx10'.*unset BERTOPT_NATIVE_ISA") as caught:
        open_session(model)
    assert caught.value.exit_code == 4
    monkeypatch.setattr(native, "supported", list)
    with pytest.raises(Unsupported, match=r"AVX2.*use convert_openvino"):
        built(reference, tmp_path / "again")


@pytest.mark.parametrize(("precision", "measured_with"), [("int8", "avx512_vnni"), ("bf16", "avx512_bf16")])
def test_an_artefact_opens_where_another_of_its_kernels_runs(
    precision: Any, measured_with: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stage(checkpoint.load(tiny(task="feature-extraction", pooling="mean")), tmp_path, precision=precision)
    manifest = stages.verify(directory)
    elsewhere = manifest.model_copy(update={"environment": {**manifest.environment, "isa": ["avx2", measured_with]}})
    (directory / stages.MANIFEST).write_text(elsewhere.sealed().text())
    monkeypatch.setattr(environment, "isa", lambda cpuinfo=None: ["avx2"])
    assert load(directory)(["the cat"]).shape == (1, 32)


def test_damaged_files_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    directory = stage(reference, tmp_path)
    path = directory / "native" / "model.bin"
    whole = path.read_bytes()
    model = stages.open_stage(directory)
    for content, error, why in (
        (whole[:-64], IntegrityError, "cut short.*export again"),
        (whole[:8] + (99).to_bytes(4, "little") + whole[12:], Unsupported, "has layout 99: export again, or install"),
        (b"", IntegrityError, "export again"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(error, match=why) as caught:
            open_session(model)
        assert caught.value.exit_code == (4 if error is Unsupported else 6)
        # Hashes come first.
        with pytest.raises(IntegrityError, match="is not the file that was exported"):
            load(directory)


def test_ids_beyond_the_vocabulary_are_the_callers_mistake(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny(task="feature-extraction", pooling="mean"))
    session = open_session(built(reference, tmp_path))
    ones = np.ones((1, 4), np.int64)
    for bad in (reference.spec.vocabulary, -1, 2**40):
        with pytest.raises(UsageError, match="the model cannot run these inputs"):
            session.run({"input_ids": ones * bad, "attention_mask": ones, "token_type_ids": 0 * ones})
    with pytest.raises(UsageError, match="token_type_ids"):
        session.run({"input_ids": ones, "attention_mask": ones})


def test_a_head_is_the_checkpoints_own(tiny: Tiny, tmp_path: Path) -> None:
    """ELECTRA's has a GELU: the others are products and numpy's functions."""
    reference = checkpoint.load(tiny(family="electra", task="text-classification"))
    model = built(reference, tmp_path)
    head = FloatHead.read(model.path.with_name(FILE))
    hidden = np.random.default_rng(0).normal(size=(33, 32)).astype(np.float32)
    with torch.inference_mode():
        expected = reference.network.encoder.classifier(torch.from_numpy(hidden)[:, None]).numpy()  # type: ignore[operator,union-attr]
    got = head(hidden, native.float_linear)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert (got[5:9] == head(hidden[5:9], native.float_linear)).all()


def test_a_changed_head_is_another_model(tiny: Tiny, tmp_path: Path) -> None:
    from bertopt.stages.fingerprint import fingerprint

    reference = checkpoint.load(tiny(family="bert", task="text-classification"))
    one, other = built(reference, tmp_path / "one"), built(reference, tmp_path / "other")
    assert fingerprint(one) == fingerprint(other)
    head = FloatHead.read(other.path.with_name(FILE))
    dataclasses.replace(head, tensors={name: 2 * value for name, value in head.tensors.items()}).write(other.path.with_name(FILE))
    assert fingerprint(one) != fingerprint(other)


def test_the_session_is_for_the_cpu(tiny: Tiny, tmp_path: Path) -> None:
    model = built(checkpoint.load(tiny(task="feature-extraction", pooling="mean")), tmp_path)
    with pytest.raises(Unsupported, match="load with device='cpu'"):
        NativeSession(model, "cuda")
