"""Task metrics: values as scikit-learn and scipy define them, intervals that are paired, seeded and cover the truth."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics

import bertopt
from bertopt.checks import task_metrics
from bertopt.core import Spec
from bertopt.errors import Unsupported, UsageError
from bertopt.recipe import texts as labelled
from tests.support.shared_workers import cheap_workers
from tests.support.specs import EMBEDDING, QUESTIONS, RERANKER, SEVERAL, TAGS, TEXT, VALUE
from tests.support.tiny_models import WORDS, Tiny, write_tiny


def measured(spec: Spec, labels: list[Any], mine: Any, reference: Any = None) -> dict[str, Any]:
    expected = task_metrics.truth(spec, labels)
    first = task_metrics.measure(spec, expected, mine, reference)
    return {found.metric: found for found in (first, *first.others)}


def test_one_label_a_text() -> None:
    rng = np.random.default_rng(0)
    logits, worse = rng.normal(size=(80, 3)), rng.normal(size=(80, 3))
    best = logits.argmax(axis=1)
    labels = [TEXT.labels[i] if rng.random() < 0.9 else TEXT.labels[0] for i in best]
    reference, mine = task_metrics.predictions(TEXT, logits), task_metrics.predictions(TEXT, worse)
    assert [row[0] for row in reference] == best.tolist()
    alone, found = measured(TEXT, labels, reference), measured(TEXT, labels, mine, reference)
    assert list(found) == ["accuracy", "macro_f1", "mcc"]
    names = [TEXT.labels[i] for i in worse.argmax(axis=1)]
    assert found["accuracy"].value == metrics.accuracy_score(labels, names)
    assert found["macro_f1"].value == pytest.approx(metrics.f1_score(labels, names, average="macro"))
    assert found["mcc"].value == pytest.approx(metrics.matthews_corrcoef(labels, names))
    for metric, each in found.items():
        assert each.reference == alone[metric].value and each.change == pytest.approx(each.value - each.reference)
        assert each.low < each.value < each.high and each.change_low < each.change < each.change_high < 0
        assert alone[metric].change_low is None and alone[metric].change == 0
    assert measured(TEXT, labels, mine, reference) == found, "seeded"
    # Accuracy's interval stays open where nothing differs; a bootstrap's cannot.
    same = measured(TEXT, labels, reference, reference)
    assert same["accuracy"].change_low < 0 < same["accuracy"].change_high
    assert (same["mcc"].change_low, same["mcc"].change_high) == (0, 0)


def test_several_labels_a_text() -> None:
    rng = np.random.default_rng(1)
    truth, logits = rng.random((60, 3)) < 0.4, rng.normal(size=(60, 3))
    labels = [tuple(name for name, here in zip(SEVERAL.labels, row, strict=True) if here) for row in truth]
    found = measured(SEVERAL, labels, task_metrics.predictions(SEVERAL, logits))
    assert list(found) == ["micro_f1", "macro_f1", "exact_match"]
    for average in ("micro", "macro"):
        assert found[f"{average}_f1"].value == pytest.approx(metrics.f1_score(truth, logits > 0, average=average))
    assert found["exact_match"].value == pytest.approx(metrics.accuracy_score(truth, logits > 0))


def test_values_and_pairs() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=50)
    labels = [str(value) for value in values]
    found = measured(VALUE, labels, task_metrics.predictions(VALUE, np.exp(values)[:, None]))
    assert found["spearman"].value == pytest.approx(1) and 0.5 < found["pearson"].value < 1
    first, second = rng.normal(size=(2, 50, 8))
    rows = task_metrics.predictions(EMBEDDING, first, second)
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    np.testing.assert_allclose([row[0] for row in rows], cosines)
    assert measured(EMBEDDING, [str(value) for value in cosines], rows)["spearman"].value == pytest.approx(1)
    broken = measured(VALUE, labels, [[float("nan")]] * 50, [[value] for value in values])
    assert np.isnan(broken["spearman"].change), "NaN keeps no limit"


def test_resamples_are_what_the_libraries_give() -> None:
    rng = np.random.default_rng(4)
    one, several, values = rng.integers(4, size=(2, 30, 1)), rng.random((2, 30, 3)) < 0.3, rng.normal(size=(2, 30, 1))
    several[:, :, 2] &= rng.random(30) < 0.1  # rare: absent from some resamples
    weights = rng.multinomial(30, np.full(30, 1 / 30), size=25)
    for (y, p), metrics_of in ((one, task_metrics._of_one_label), (several, task_metrics._of_several_labels), (values, task_metrics._of_values)):
        for name, metric in metrics_of().items():
            rows = [np.repeat(np.arange(30), counts) for counts in weights]
            expected = [metric.value(y[chosen], p[chosen]) for chosen in rows]
            np.testing.assert_allclose(metric.resampled(y, p, weights), expected, atol=1e-12, err_msg=name)


def test_intervals_hold_the_true_change_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    n, held = 200, 0
    for _ in range(20):
        truth = rng.integers(3, size=n)
        mine, reference = (np.where(rng.random(n) < p, truth, rng.integers(3, size=n)) for p in (0.7, 0.8))
        found = task_metrics.measure(TEXT, truth[:, None], mine[:, None], reference[:, None])  # type: ignore[arg-type]
        mcc = found.others[1]
        held += mcc.change_low <= -0.1 <= mcc.change_high  # type: ignore[operator]
    assert held >= 17


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(Unsupported, match=r"bertopt\[metrics\]"):
        task_metrics.measure(TEXT, [[0.0]], [[0.0]], None)
    assert task_metrics.measure(VALUE, [[0.0]] * 3, [[0.0]] * 3, None).metric == "spearman"


@pytest.mark.parametrize(
    ("lines", "spec", "said"),
    [
        (['{"text": "a", "label": 1, "text_pair": "b"}', '{"text": "a", "label": 1}'], EMBEDDING, ":2: no text_pair, but other lines have one"),
        (['{"text": "a", "label": 1, "text_pair": ["b"]}'], EMBEDDING, ":1: text_pair must be text; got list"),
        (['{"text": "a", "label": [["x"]]}'], SEVERAL, ":1: label must be text or a number, or a list of these"),
        (['{"text": "a", "label": []}', '{"text": "a", "label": ["good", "fine"]}'], SEVERAL, ":2: label must be one of .*; got 'fine'"),
        (['{"text": "a", "label": ["good"]}'], TEXT, ":1: label must be one label, .*; got a list of 1"),
        (['{"text": "a", "label": 1}', '{"text": "a", "label": "x"}'], VALUE, ":2: label must be a number; got 'x'"),
        (['{"text": "a", "text_pair": "b", "label": "LABEL_0"}'], RERANKER, ":1: label must be a number; got 'LABEL_0'"),
        (['{"text": "a", "label": "nan"}'], VALUE, ":1: label must be a number; got 'nan'"),
        (['{"text": "a b", "label": ["O"]}'], TAGS, ":1: label must be a list of one tag for each of the text.s 2 words; got a list of 1"),
        (['{"text": "a b", "label": ["O", "B-X"]}'], TAGS, ":1: label must be one of .*; got 'B-X'"),
        (['{"text": "a b", "label": "O"}'], TAGS, ":1: label must be a list of one tag .*; got 'O'"),
        (['{"text": "a", "text_pair": "b", "label": []}'], QUESTIONS, ":1: label must be the answer, or a list"),
        (['{"text": "a", "text_pair": "b", "label": "x"}'], EMBEDDING, ":1: label must be a number; got 'x'"),
    ],
)
def test_labels_that_do_not_fit_name_their_line(tmp_path: Path, lines: list[str], spec: Spec, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=said):
        labelled.read(path).check_labels(spec)


def test_mistakes_of_lines_and_of_the_whole_file_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a", "text_pair": "b", "label": 1}\nno JSON\n{"text": "a", "text_pair": "b"}\n{"text": "a", "label": 1}\n')
    with pytest.raises(UsageError) as error:
        labelled.read(path)
    found = "\n".join(error.value.problems)
    assert ":2: expected a JSON object" in found and ":3: no label, but" in found and ":4: no text_pair, but" in found


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    with cheap_workers("pipeline"):
        yield


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("kind", ["several", "value", "pairs of embeddings", "pairs of classes", "pairs of a re-ranker", "tags", "pairs for questions"])
def test_a_run_measures_every_task(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    names, tags = ["bad", "good", "mixed"], ["O", "B-PER", "I-PER"]
    rows = [
        {"text": f"{WORDS[i]} {WORDS[-i]} !", "label": {"several": names[: i % 4], "pairs of classes": names[i % 3], "tags": [tags[i % 2], tags[2], tags[0]], "pairs for questions": "cat"}.get(kind, i / 4)}
        | ({"text_pair": f"{WORDS[-i]} a cat"} if "pairs" in kind else {})
        for i in range(20)
    ]
    texts = tmp_path / "t.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)) + "\n")
    if "embeddings" in kind:
        model = tiny("bert", "feature-extraction", "mean")
    elif kind == "tags":
        model = write_tiny(tmp_path / "model", "bert", "token-classification")
        config = json.loads((model / "config.json").read_text())
        config |= {"id2label": dict(enumerate(tags)), "label2id": {tag: i for i, tag in enumerate(tags)}}
        (model / "config.json").write_text(json.dumps(config))
    elif kind == "pairs for questions":
        model = tiny("bert", "question-answering")
    elif kind == "pairs of a re-ranker":
        model = write_tiny(tmp_path / "model", extra={"num_labels": 1})
    elif kind == "value":
        model = write_tiny(tmp_path / "model", extra={"num_labels": 1, "problem_type": "regression"})
    else:
        model = write_tiny(tmp_path / "model", extra={"problem_type": "multi_label_classification"} if kind == "several" else {})
    recipe = {"schema_version": 1, "model": str(model), "device": "cpu", "limits": {"float32": {"metric_drop_max": 0.0}},
              "steps": [{"pass": "use_sdpa"}], "inputs": {"shapes": [[1, 8]], "texts": str(texts)}}  # fmt: skip
    report = bertopt.run(recipe, tmp_path / "out")
    again = bertopt.run(recipe, tmp_path / "out")
    expected = {"several": "micro_f1", "pairs of classes": "accuracy", "tags": "entity_f1", "pairs for questions": "answer_f1"}.get(kind, "spearman")
    assert report.exit_code == 0, report.reason
    found = report.stages[1].quality
    assert found is not None and (found.metric, found.n) == (expected, 20)
    assert found.value == pytest.approx(found.reference, abs=1e-6) and found.others and again.stages[1].quality == found
