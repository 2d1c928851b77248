"""Reduced precision is judged by what its rounding should cost: the simulated rounding, its figures and their limits."""

from __future__ import annotations

import copy
import datetime
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from bertopt.checks import gates, parity, twin
from bertopt.checks.parity import DEFAULT_LIMITS, ProbeOutputs, cosine_median
from bertopt.core import Context, Int8Rounding, Precision
from bertopt.modeling import checkpoint, rounding
from bertopt.passes import CastHalf
from bertopt.results import Limits
from bertopt.results.fidelity import Certificate, Rounding
from tests.support.measured import case, measured
from tests.support.specs import SEVERAL, VALUES, spec
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, ROTARY_FAMILIES, Tiny, write_tiny

SPEC = spec(task="text-classification")
DICE = np.random.default_rng(0)
REFERENCE = DICE.normal(size=(200, 3)) * 3
NOISE = DICE.normal(size=(200, 3)) * 0.01
LARGEST = int(np.linalg.norm(REFERENCE, axis=1).argmax())
TWIN = REFERENCE + DICE.normal(size=(200, 3)) * 0.01


def figures(got: Any, parent: Any = None) -> Rounding:
    def answers(values: Any) -> Any:
        return {"texts": ProbeOutputs({SPEC.outputs[0]: values})}

    found = twin.compare(
        SPEC, ["texts", "not run"], answers(got), answers(TWIN), answers(REFERENCE), None if parent is None else answers(parent)
    )
    assert found is not None
    return found


def missed(found: Rounding, precision: Any = "bfloat16") -> set[str | None]:
    return {failure.metric for failure in gates.find_failures(measured(rounding=found), DEFAULT_LIMITS[precision])}


def test_errors_of_the_twin_s_size_pass() -> None:
    found = figures(REFERENCE + NOISE)
    assert found.error_ratio == pytest.approx(1, abs=0.15) and found.vectors == 200 and found.parent_ratio is None
    assert missed(found) == set()


@pytest.mark.parametrize(
    ("got", "metric"),
    [
        (REFERENCE + 2 * NOISE, "error_ratio_max"),
        (REFERENCE * 1.05 + NOISE, "slope_error_max"),
        (REFERENCE + NOISE + [0.0, 0.04, 0.0], "bias_max"),
        (np.roll(REFERENCE, 1, axis=1), "flip_margin_max"),
        (REFERENCE * np.where(np.arange(200) == LARGEST, 0.9, 1.0)[:, None] + NOISE, "worst_ratio_max"),
    ],
    ids=["noise", "temperature", "class bias", "swapped labels", "one vector"],
)  # fmt: skip
def test_each_figure_shows_its_fault(got: Any, metric: str) -> None:
    assert metric in missed(figures(got))


def test_one_wrong_column_of_many_is_seen() -> None:
    """Of many dimensions one takes a small part of the error, whatever it holds; right ones differ by no more than the twin's."""
    reference = DICE.normal(size=(200, 300))
    noise = DICE.normal(size=(3, 200, 300)) * 0.15 * np.where(np.arange(300) == 9, 6, 1)
    lost = np.where(np.arange(300) == 7, 0, reference)

    def found(got: Any) -> Rounding:
        asked = [{"texts": ProbeOutputs({"sentence_embedding": values})} for values in (got, reference + noise[1], reference)]
        compared = twin.compare(spec(task="feature-extraction", pooling="mean"), ["texts"], *asked)
        assert compared is not None
        return compared

    assert missed(found(reference + noise[0]), "int8") == set()
    assert missed(found(lost + noise[0]), "int8") == {"column_ratio_max"}
    noise[0, 8, 7] = math.nan
    assert math.isnan(found(reference + noise[0]).column_ratio or 0)


def test_each_of_several_numbers_is_held_to_its_own_rounding() -> None:
    """A rating without its bias was delivered in bf16 and INT8: the price beside it takes all of the error."""
    sizes = np.array([1.0, 1e4])
    reference = (DICE.normal(size=(200, 2)) + 3) * sizes
    noise = DICE.normal(size=(2, 200, 2)) * 0.03 * sizes

    def found(got: Any) -> set[str | None]:
        asked = [{"texts": ProbeOutputs({"logits": values})} for values in (got, reference + noise[1], reference)]
        compared = twin.compare(VALUES, ["texts"], *asked)
        assert compared is not None
        return missed(compared, "int8")

    assert found(reference + noise[0]) == set()
    assert {"error_ratio_max", "bias_max"} <= found(reference + noise[0] - [3.0, 0.0])
    assert "slope_error_max" in found((reference + noise[0]) * [0.5, 1.0])
    assert "column_ratio_max" in found((reference + noise[0])[:, ::-1] / sizes[::-1] * sizes)


def test_each_of_several_labels_is_held_to_its_own_rounding() -> None:
    """A label half of what it is was delivered in bf16 and INT8: it varied a tenth as much as the others, which took all of the error."""
    usual, shifts = np.array([3.0] * 8 + [1.0] * 12 + [0.3] * 8), np.array([-2.0] * 8 + [-5.0] * 12 + [0.0] * 8)
    reference = DICE.normal(size=(200, 28)) * usual + shifts
    noise = DICE.normal(size=(2, 200, 28)) * 0.03 * usual

    def found(got: Any) -> set[str | None]:
        asked = [{"texts": ProbeOutputs({"logits": values})} for values in (got, reference + noise[1], reference)]
        compared = twin.compare(SEVERAL, ["texts"], *asked)
        assert compared is not None
        return missed(compared, "int8")

    one = np.arange(28) == 24
    assert found(reference + noise[0]) == set()
    assert "column_ratio_max" in found(np.where(one, 0.5, 1.0) * (reference + noise[0]))
    assert "bias_max" in found(reference + noise[0] + np.where(one, 0.05, 0.0))


def test_one_vector_may_be_as_far_off_as_the_twin_s_farthest() -> None:
    """Whichever it is: errors may have a long tail."""
    far = 0.4 * NOISE[0] / np.linalg.norm(NOISE[0])

    def found(mine: int, its: int) -> set[str | None]:
        got, other = (REFERENCE + NOISE + (np.arange(200) == row)[:, None] * far for row in (mine, its))
        asked = [{"texts": ProbeOutputs({"logits": values})} for values in (got, other, REFERENCE)]
        compared = twin.compare(SPEC, ["texts"], *asked)
        assert compared is not None
        return missed(compared)

    assert "worst_ratio_max" not in found(7, 90)
    assert "worst_ratio_max" in missed(figures(REFERENCE + NOISE + (np.arange(200) == 7)[:, None] * far))


def test_a_label_may_change_where_the_twin_s_largest_error_could_change_it() -> None:
    """Errors with a long tail: one text of a hundred takes most of them, in the stage another one than in the twin."""
    reference = np.tile([2.0, 0.0, -2.0], (200, 1))

    def answers(values: Any) -> Any:
        return {"texts": ProbeOutputs({SPEC.outputs[0]: values})}

    def with_tail(row: int, size: float) -> Any:
        return reference + NOISE + (np.arange(200) == row)[:, None] * np.array([-size, size, 0.0])

    margins = []
    for size in (1.1, 0.3):
        found = twin.compare(SPEC, ["texts"], answers(with_tail(7, 1.1)), answers(with_tail(90, size)), answers(reference))
        assert found is not None and found.flip_margin is not None
        margins.append(found.flip_margin)
    assert margins[0] < DEFAULT_LIMITS["int8"].flip_margin_max < margins[1]


def test_a_label_of_several_changes_where_its_score_crosses_one_half() -> None:
    """The best label of a text stays the best: the other that it has is lost."""
    several = spec(task="text-classification", multi_label=True)
    reference = np.tile([[4.0, 1.0, -3.0], [4.0, -2.0, -3.0]], (100, 1))
    lost = reference + NOISE - np.where(np.arange(200) == 8, 1.5, 0.0)[:, None] * [0.0, 1.0, 0.0]

    def margin(got: Any) -> float | None:
        asked = [{"texts": ProbeOutputs({"logits": values})} for values in (got, reference + NOISE[::-1], reference)]
        found = twin.compare(several, ["texts"], *asked)
        return None if found is None else found.flip_margin

    assert margin(reference + NOISE) == 0
    found = margin(lost)
    assert found is not None and found > DEFAULT_LIMITS["int8"].flip_margin_max
    lost[8, 1] = math.nan
    assert math.isnan(margin(lost) or 0)


def test_what_keeps_its_parent_s_precision_is_held_to_its_parent() -> None:
    assert missed(figures(REFERENCE + NOISE, REFERENCE + NOISE)) == set()
    assert "parent_ratio_max" in missed(figures(REFERENCE + NOISE, REFERENCE - NOISE))


def test_nan_never_passes() -> None:
    found = figures(np.where(np.arange(200)[:, None] == 7, math.nan, REFERENCE))
    failures = gates.find_failures(measured(rounding=found), DEFAULT_LIMITS["int8"])
    assert {failure.metric for failure in failures} == {None} and len(failures) >= 3


def test_embeddings_are_ranked() -> None:
    embeds = spec(task="feature-extraction", pooling="mean", outputs=("sentence_embedding",))
    vectors, noise = DICE.normal(size=(40, 8)), DICE.normal(size=(40, 8))

    def answers(values: Any) -> Any:
        return {"texts": ProbeOutputs({"sentence_embedding": values})}

    shuffled = twin.compare(
        embeds, ["texts"], answers(vectors[::-1]), answers(vectors + 0.01 * noise), answers(vectors)
    )
    assert shuffled is not None and shuffled.rank_ratio is not None and shuffled.rank_ratio > 10
    assert shuffled.flip_margin is None


def test_spans_of_batches_of_several_lengths_are_compared() -> None:
    spans = spec(task="question-answering", outputs=("start_logits", "end_logits"))
    reference = {name: ProbeOutputs({o: DICE.normal(size=(2, width)) for o in spans.outputs}) for name, width in (("a", 4), ("b", 7))}
    found = twin.compare(spans, ["a", "b"], reference, reference, reference)
    assert found is not None and found.error == 0 and found.vectors == 8


def test_the_median_of_each_padding_pattern_is_held_not_its_worst_row() -> None:
    cases = [case(cosine_mean=0.9), *[case(cosine_mean=0.999)] * 3]
    assert cosine_median(cases) == pytest.approx(0.999)
    left = [case().model_copy(update={"padding": "left", "cosine_mean": 0.5})] * 2
    assert cosine_median([*cases, *left]) == 0.5
    assert math.isnan(cosine_median([case(cosine_mean=math.nan)]))


def test_the_median_counts_rows_not_batches() -> None:
    few = [case().model_copy(update={"batch": 1, "cosine_mean": 0.8})] * 3
    many = [case().model_copy(update={"batch": 8, "cosine_mean": 0.999})] * 2
    assert cosine_median([*few, *many]) == pytest.approx(0.999)


def test_outputs_under_the_clock_are_held_to_the_median_in_reduced_precision() -> None:
    clocked = case(cosine_mean=0.5).model_copy(update={"padding": "timed"})
    missing = parity.failures([case(), clocked], DEFAULT_LIMITS["int8"])
    assert [failure.metric for failure in missing] == ["cosine_median_min"] and "under the clock" in missing[0].text


def test_a_claim_that_is_not_proven_gets_the_limits_of_float32() -> None:
    assert gates.judged_precision("int8", 0.9) == "int8" and gates.judged_precision("int8", None) == "int8"
    assert gates.judged_precision("int8", 0.001) == gates.judged_precision("int8", math.nan) == "float32"
    outcome = gates.judge(
        "x", measured(proven=0.001), gates.effective_limits("float32"), changes={"tensors": 1}, today=datetime.date(2026, 1, 1)
    )
    assert outcome.status == "failed" and "0% of the products' weights" in (outcome.reason or "")


def test_a_contradicted_certificate_fails_unless_the_recipe_says_otherwise() -> None:
    wrong = Certificate(status="contradicted", reason="'x' is not the parent's, rounded", weights=3)
    limits = DEFAULT_LIMITS["bfloat16"]
    (failure,) = gates.find_failures(measured(certificate=wrong), limits)
    assert failure.gate == "certificate" and failure.metric == "certified"
    assert not gates.find_failures(measured(certificate=wrong), Limits(certified=False).over(limits))
    assert not gates.find_failures(measured(certificate=Certificate(status="none", reason="fused")), limits)


@pytest.mark.parametrize("family", ["modernbert", "nomic_bert", "ultrabert", "mpnet", "deberta-v2"])
def test_late_positions_and_far_distances_are_simulated_as_a_cast_has_them(family: str, tmp_path: Path) -> None:
    """Simulated angles were rounded: in bfloat16 the twin of a text of 400 tokens was wrong, and so might be every stage held to it."""
    extra = {"max_position_embeddings": 402} | ({"position_buckets": 64} if family == "deberta-v2" else {})
    directory = write_tiny(tmp_path / "model", family, "token-classification", extra=extra)
    model = checkpoint.load(directory)
    simulated = checkpoint.load(directory).network
    cast = CastHalf(dtype="bfloat16")(model, Context(tmp_path)).model.network
    rounding.simulate(simulated, "bfloat16")
    inputs = model.network.example(2, 400)
    with torch.inference_mode():
        expected, got, own = (network(*inputs)[0][:, 300:] for network in (model.network, simulated, cast))
    assert 0.5 < float((got - expected).norm() / (own - expected).norm()) < 1.5


#: Classifiers by what they read: the first token, the mean of all, or the mean of their answers to all.
CLASSIFIERS = [("bert", {}), ("modernbert", {"classifier_pooling": "mean"}), ("eurobert", {"classifier_pooling": "mean"}), ("eurobert", {}),
               ("ultrabert", {"classifier_pooling": "mean"})]  # fmt: skip


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(("family", "extra"), CLASSIFIERS, ids=str)
def test_the_simulation_rounds_as_torch_s_own_half_precision_does(tmp_path: Path, family: str, extra: Any, precision: Any) -> None:
    """On a CPU torch sums in float32 and rounds each operator's result: errors are of one size."""
    directory = str(write_tiny(tmp_path, family, extra=extra))
    model = checkpoint.load(directory, "text-classification", None)
    inputs = model.network.example(4, 12)
    cast, simulated = (checkpoint.load(directory, "text-classification", None).network for _ in range(2))
    cast.encoder.to(getattr(torch, precision))
    rounding.simulate(simulated, precision)
    with torch.inference_mode():
        expected, got, own = (network(*inputs)[0] for network in (model.network, simulated, cast))
    size, cost = (got - expected).norm(), (own - expected).norm()
    assert size > 0 and 0.4 < float(size / cost) < 2.5


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_simulation_masks_with_the_lowest_number_of_its_own_type(tiny: Tiny, precision: Any) -> None:
    """DeBERTa masks whole rows of padding with float32's: infinity in half precision, where softmax gives NaN."""
    model = checkpoint.load(str(tiny("deberta-v2")), "text-classification", None)
    cast, simulated = (checkpoint.load(str(tiny("deberta-v2")), "text-classification", None).network for _ in range(2))
    inputs = dict(zip(model.spec.network_inputs, model.network.example(4, 12), strict=True))
    inputs["attention_mask"][1:, 5:] = 0
    cast.encoder.to(getattr(torch, precision))
    rounding.simulate(simulated, precision)
    with torch.inference_mode():
        expected, got, own = (network(*inputs.values())[0] for network in (model.network, simulated, cast))
    assert torch.isfinite(got).all() and 0.4 < float((got - expected).norm() / (own - expected).norm()) < 2.5


@pytest.mark.parametrize(("family", "extra"), CLASSIFIERS, ids=str)
def test_static_scales_are_those_of_all_batches(tmp_path: Path, family: str, extra: Any) -> None:
    directory = str(write_tiny(tmp_path, family, extra=extra))
    found = []
    for sizes in ((2, 7), (7, 2)):
        network: Any = checkpoint.load(directory, "text-classification", None).network
        batches = [network.example(size, size + 4) for size in sizes]
        with torch.inference_mode():
            rounding.simulate(network, "int8", Int8Rounding("static"), calibrate=lambda: [network(*batch) for batch in batches])  # noqa: B023
            found.append(network(*network.example(4, 12))[0])
    assert torch.equal(*found), "whichever batch came last"


@pytest.mark.parametrize("scales", ["batch", "token", "static"])
def test_the_simulation_of_int8_rounds_what_linear_layers_read(scales: Any) -> None:
    layer = nn.Linear(8, 4)
    network = nn.Module()
    network.encoder = nn.Sequential(layer)
    before = layer.weight.detach().clone()
    values = torch.randn(2, 5, 8) * torch.tensor([1.0, 100.0])[:, None, None]
    rounding.simulate(network, "int8", Int8Rounding(scales), calibrate=lambda: layer(values))
    steps = layer.weight / (before.abs().amax(1, keepdim=True) / 127)
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert (layer.weight - before).abs().max() <= (before.abs().amax(1) / 254).max() * 1.001
    (hook,) = layer._forward_pre_hooks.values()
    small, rounded = values[:1], [hook(layer, (given,))[0] for given in (values, values[:1])]
    far = [float((got - small).abs().max() / small.abs().max()) for got in (rounded[0][:1], rounded[1])]
    # A small text beside a large one, and alone: whose scale is it given?
    assert [one < 0.01 for one in far] == {"batch": [False, True], "token": [True, True], "static": [False, False]}[scales]


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (7, 64)])
def test_weights_are_rounded_to_the_bits_that_they_are_stored_in(bits: Any, levels: int) -> None:
    layer, table = nn.Linear(8, 4), nn.Embedding(6, 8)
    network = nn.Module()
    network.encoder = nn.Sequential(table, layer).requires_grad_(False)
    before = layer.weight.clone(), table.weight.clone()
    rounding.simulate(network, "int8", Int8Rounding(embeddings=True, weight_bits=bits))
    for got, exact, most in ((layer.weight, before[0], levels), (table.weight, before[1], 127)):
        steps = got / (exact.abs().amax(1, keepdim=True) / most)
        assert torch.allclose(steps, steps.round(), atol=1e-3) and float(steps.abs().max()) == pytest.approx(most)


@pytest.mark.parametrize(
    ("family", "task", "kept", "projection"),
    [
        ("bert", "text-classification", {"bert.pooler.dense", "classifier"}, None), ("bert", "fill-mask", set(), None),
        ("roberta", "token-classification", {"classifier"}, None), ("distilbert", "question-answering", {"qa_outputs"}, None),
        ("albert", "fill-mask", set(), "albert.encoder.embedding_hidden_mapping_in"),
        ("albert", "text-classification", {"albert.pooler", "classifier"}, "albert.encoder.embedding_hidden_mapping_in"),
        ("roformer", "text-classification", {"classifier.dense", "classifier.out_proj"}, "roformer.embeddings_project"),
        ("modernbert", "token-classification", {"head.dense", "classifier"}, None), ("eurobert", "fill-mask", set(), None),
        ("deberta-v2", "text-classification", {"pooler.dense", "classifier"}, None), ("squeezebert", "text-classification", {"transformer.pooler.dense", "classifier"}, None),
    ],
)  # fmt: skip
def test_products_beside_the_layers_stay_float_where_the_pass_says_so(
    tiny: Tiny, family: str, task: str, kept: set[str], projection: str | None
) -> None:
    """The native encoder's pooler and classifiers are float, what projects its embeddings bfloat16; its heads over a vocabulary are INT8."""
    networks: list[Any] = [checkpoint.load(tiny(family, task)).network for _ in range(2)]
    before = {name: module.weight.clone() for name, module in networks[0].encoder.named_modules() if isinstance(module, nn.Linear)}
    for network, how in zip(networks, (Int8Rounding("token"), Int8Rounding("token", layers_only=True)), strict=True):
        rounding.simulate(network, "int8", how)
    every, some = ({name: network.encoder.get_submodule(name).weight for name in before} for network in networks)
    assert not [name for name, weight in every.items() if torch.equal(weight, before[name])]
    assert {name for name, weight in some.items() if torch.equal(weight, before[name])} == kept | ({projection} if projection else set())
    for name in kept | ({projection} if projection else set()):
        module = networks[1].encoder.get_submodule(name)
        values = torch.linspace(-1, 1, 3 * module.in_features).reshape(3, -1)
        factors = [each.bfloat16().float() if name == projection else each for each in (values, module.weight)]
        assert torch.equal(module(values), nn.functional.linear(*factors, module.bias)), name


def test_the_simulation_of_smooth_quant_keeps_answers_and_shrinks_large_channels() -> None:
    layer, size = nn.Linear(8, 4, bias=False).requires_grad_(False), torch.tensor([100.0] + [1.0] * 7)
    network = OnlyEncoder(nn.Sequential(layer))
    values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * size
    exact = [(values * (size == one)) @ layer.weight.T for one in (1.0, 100.0)]
    error = []
    for alpha in (None, 0.5):
        again = copy.deepcopy(network)
        rounding.simulate(again, "int8", Int8Rounding("static", smooth_quant=alpha), calibrate=lambda net=again: net(values))
        error.append([float((again(values * (size == one)) - of).norm() / of.norm()) for one, of in zip((1.0, 100.0), exact, strict=True)])
    assert error[1][0] < 0.5 * error[0][0], "small channels keep more of their values"
    assert max(error[1]) < 0.1


@pytest.mark.parametrize(("embeddings", "draw"), [(False, 0), (True, 0), (True, 3)])
def test_the_simulation_of_int8_rounds_tables_of_embeddings_where_the_pass_does(embeddings: bool, draw: int) -> None:
    table, layer = nn.Embedding(6, 8), nn.Linear(8, 6)
    layer.weight = table.weight
    network = nn.Module()
    network.encoder = nn.Sequential(table, nn.Linear(8, 8)).requires_grad_(False)
    before = table.weight.detach().clone()
    rounding.simulate(network, "int8", Int8Rounding(embeddings=embeddings), draw)
    far = (table.weight - before).abs() / (before.abs().amax(1, keepdim=True) / 127)
    assert (float(far.max()) > 0) == embeddings and float(far.max()) < 0.501
    again = nn.Module()
    again.encoder = nn.Sequential(table, layer).requires_grad_(False)
    table.weight.data = before.clone()
    rounding.simulate(again, "int8", Int8Rounding(embeddings=embeddings), draw)
    far = (table.weight - before).abs() / (before.abs().amax(1, keepdim=True) / 127)
    assert float(far.max()) < 0.501, "weights that are shared are rounded once"


class OnlyEncoder(nn.Module):
    """A network that does nothing but encode."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, values: torch.Tensor) -> Any:
        return self.encoder(values)


class Shared(nn.Module):
    """One layer, called for small values and then for large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(values), self.layer(100 * values)])


@pytest.mark.parametrize("smooth", [True, False])
def test_each_place_of_a_shared_layer_has_a_scale_of_its_own(smooth: bool) -> None:
    torch.manual_seed(0)
    values, network = torch.randn(64, 8), OnlyEncoder(Shared().requires_grad_(False))
    expected, before = network(values), network.encoder.layer.weight.clone()
    how = Int8Rounding("static", smooth_quant=0.5, smooth_shared=smooth)
    rounding.simulate(network, "int8", how, calibrate=lambda: [network(part) for part in values.chunk(4)])
    for _ in range(2):
        got = network(values)
        assert all(float((one - of).norm() / of.norm()) < 0.03 for one, of in zip(got, expected, strict=True))
    assert (float((network.encoder.layer.weight - before).abs().max()) > 0.02) == smooth


@pytest.mark.parametrize("precision", ["int8", "bfloat16", "float16", "float8"])
def test_every_draw_of_every_precision_errs_otherwise_by_as_much(tiny: Tiny, precision: Any) -> None:
    model = checkpoint.load(str(tiny()), "text-classification", None)
    inputs, errors = model.network.example(8, 12), []
    for draw in (0, 1, 2, 2):
        simulated: Any = checkpoint.load(str(tiny()), "text-classification", None).network
        rounding.simulate(simulated, precision, draw=draw)
        with torch.inference_mode():
            errors.append(simulated(*inputs)[0] - model.network(*inputs)[0])
    assert torch.equal(errors[2], errors[3])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(errors[one], errors[other]) and 0.3 < float(errors[one].norm() / errors[other].norm()) < 3


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *ROTARY_FAMILIES, *NORM_FIRST_FAMILIES])
def test_a_twin_of_every_family_and_precision_is_finite_beside_padding(tiny: Tiny, family: str) -> None:
    directory = str(tiny(family))
    ids, mask, *rest = checkpoint.load(directory, "text-classification", None).network.example(3, 12)
    mask[1:, 5:] = 0
    for precision in get_args(Precision):
        simulated: Any = checkpoint.load(directory, "text-classification", None).network
        rounding.simulate(simulated, precision)
        with torch.inference_mode():
            assert simulated(ids, mask, *rest)[0].isfinite().all(), precision


def test_every_draw_rounds_otherwise_by_as_much_and_the_same_draw_alike() -> None:
    weight = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    drawn = [rounding._int8_weights(weight, 127, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    errors = [each - weight for each in (rounding._int8_weights(weight, 127), drawn[0], drawn[2])]
    assert torch.equal(drawn[0], drawn[1])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float(errors[one].norm() / errors[other].norm()) == pytest.approx(1, abs=0.1)
        assert abs(float((errors[one] * errors[other]).sum() / errors[one].norm() / errors[other].norm())) < 0.15


def test_a_stage_that_misses_a_limit_beside_one_twin_is_held_to_the_costliest() -> None:
    small, usual = (figures(REFERENCE + size * NOISE) for size in (3, 1))
    asked = list[int]()

    def compared(draw: int) -> Rounding:
        asked.append(draw)
        return small if draw < 2 else usual.model_copy(update={"bias": 9.0})

    found = twin.beside(8, compared, lambda one: one.error_ratio < 1.3)
    assert found is not None and asked == [0, 1, 2]
    assert found.error_ratio == usual.error_ratio and found.bias == small.bias
    asked.clear()
    assert twin.beside(2, compared, lambda one: False) == small and asked == [0, 1]
    broken = small.model_copy(update={"error_ratio": math.nan})
    joined = twin.beside(2, lambda draw: broken if draw == 0 else usual, lambda one: False)
    assert joined is not None and math.isnan(joined.error_ratio), "NaN never passes"


def test_where_outputs_hardly_vary_one_error_of_all_is_left_to_the_bias() -> None:
    """A classifier whose upper layers were cut gives every text nearly the same answer, so that all take one rounding error."""
    dice = np.random.default_rng(3)
    reference = np.array([0.5, -0.3, 0.2]) + dice.normal(size=(200, 3)) * 0.003
    drawn = np.array([2.0, -1.0, 1.5]) * 1e-3
    twin_, noise = reference + drawn + dice.normal(size=(200, 3)) * 3e-4, dice.normal(size=(200, 3)) * 3e-4

    def of(got: Any) -> Rounding:
        answers = ({SPEC.outputs[0]: values} for values in (got, twin_, reference))
        found = twin.compare(SPEC, ["texts"], *({"texts": ProbeOutputs(one)} for one in answers))
        assert found is not None
        return found

    assert missed(of(reference - 1.7 * drawn + noise)) == set()
    assert "bias_max" in missed(of(reference - 4 * drawn + noise))
    assert "error_ratio_max" in missed(of(reference + drawn + 3 * noise))
    assert None in missed(of(np.where(reference > 0, np.nan, reference))), "NaN is no figure to waive"


def test_a_slope_is_held_to_how_outputs_vary() -> None:
    """Where they hardly do, an error that is small beside them is large beside their variation."""
    level = 5 + DICE.normal(size=(200, 3)) * 0.1

    def answers(values: Any) -> Any:
        return {"texts": ProbeOutputs({SPEC.outputs[0]: values})}

    found = [
        twin.compare(SPEC, ["texts"], answers(5 + (level - 5) * slope), answers(level + NOISE), answers(level))
        for slope in (1.05, 1.3)
    ]
    assert [one is not None and one.slope_error < DEFAULT_LIMITS["int8"].slope_error_max for one in found] == [True, False]
