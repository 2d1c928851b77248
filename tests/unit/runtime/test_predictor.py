"""`bertopt.load`'s Predictor answers as transformers does, for every task."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertopt.core import Context, Session, Spec
from bertopt.errors import UsageError
from bertopt.modeling import checkpoint
from bertopt.passes import PackSequences
from bertopt.runtime.batch_limits import BatchLimits
from bertopt.runtime.batch_plan import plan
from bertopt.runtime.cost_model import Costs, expected
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from tests.support.tiny_models import Tiny, tokenizer

TEXTS = ["the cat sat", "a very good film , not bad !", "on the mat is a dog and she ran ' - ' 1 2 3", "", "was it ?"]
Opened = Callable[..., tuple[Path, Predictor]]


def predictor(directory: Path, task: str = "auto", **options: Any) -> Predictor:
    """As `bertopt.load` opens a stage, which holds the tokenizer as transformers would use it."""
    model = checkpoint.load(directory, task)
    with tempfile.TemporaryDirectory() as snapshot:
        checkpoint.write_snapshot(model, Path(snapshot))
        return Predictor(open_session(model, threads=1), model.spec, Path(snapshot), **options)


@pytest.fixture(scope="module")
def opened(tiny: Tiny) -> Opened:
    made: dict[Any, tuple[Path, Predictor]] = {}

    def go(task: str, family: str = "bert", pooling: str | None = None) -> tuple[Path, Predictor]:
        if (task, family, pooling) not in made:
            directory = tiny(family, task, pooling)
            made[task, family, pooling] = directory, predictor(directory)
        return made[task, family, pooling]

    return go


def plain(directory: Path, kind: str, text: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The tokens and raw answers [S, …] of one text by transformers alone."""
    import torch
    import transformers

    encode = transformers.AutoTokenizer.from_pretrained(directory)
    model = getattr(transformers, kind).from_pretrained(directory, attn_implementation="eager").eval()
    tokens = encode(
        *(text if isinstance(text, tuple) else (text,)),
        return_tensors="pt",
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    with torch.inference_mode():
        answers = model(**{name: tokens[name] for name in ("input_ids", "attention_mask", "token_type_ids")})
    return tokens, {name: value[0].numpy() for name, value in answers.items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_text_classification(opened: Opened, family: str) -> None:
    import transformers

    directory, predict = opened("text-classification", family)
    expected = transformers.pipeline("text-classification", str(directory))(TEXTS)
    got = predict(TEXTS)
    assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in expected], atol=1e-5)


@pytest.mark.parametrize(("labels", "problem"), [(1, None), (3, "multi_label_classification"), (1, "regression")])
def test_scores_that_are_no_distribution(tmp_path: Path, labels: int, problem: str | None) -> None:
    import transformers

    size = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(**size, max_position_embeddings=64, num_labels=labels, problem_type=problem)
    transformers.set_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer(tmp_path)
    expected = transformers.pipeline("text-classification", str(tmp_path))(TEXTS)
    # By default a multi-label model gives all its labels, best first.
    got = [answer[0] if isinstance(answer, list) else answer for answer in predictor(tmp_path, "text-classification")(TEXTS)]
    assert [entry["label"] for entry in got] == [entry["label"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in got], [e["score"] for e in expected], atol=1e-5)


def test_pairs(opened: Opened) -> None:
    directory, predict = opened("text-classification")
    pair = ("the cat sat", "was it good ?")
    _, answers = plain(directory, "AutoModelForSequenceClassification", pair)
    (got,) = predict([pair])
    assert got["score"] == pytest.approx(float(softmax(answers["logits"]).max()), abs=1e-5)
    (swapped,) = predict([pair[::-1]])
    assert swapped["score"] != pytest.approx(got["score"], abs=1e-6)


def test_token_classification(opened: Opened) -> None:
    directory, predict = opened("token-classification")
    for text, got in zip(TEXTS, predict(TEXTS), strict=True):
        tokens, answers = plain(directory, "AutoModelForTokenClassification", text)
        scores = softmax(answers["logits"])[1:-1]
        offsets = [tuple(pair) for pair in tokens["offset_mapping"][0].tolist()[1:-1]]
        assert [(entry["start"], entry["end"]) for entry in got] == offsets
        assert [entry["word"] for entry in got] == [text[start:end] for start, end in offsets]
        assert [entry["entity"] for entry in got] == [["bad", "good", "mixed"][i] for i in scores.argmax(axis=-1)]
        np.testing.assert_allclose([e["score"] for e in got], scores.max(axis=-1, initial=0), atol=1e-5)


def test_question_answering(opened: Opened) -> None:
    directory, predict = opened("question-answering")
    pairs = [("who sat ?", "the cat sat on the mat , and the dog ran"), ("was it good ?", "a film")]
    for (question, context), got in zip(pairs, predict(pairs), strict=True):
        tokens, answers = plain(directory, "AutoModelForQuestionAnswering", (question, context))
        inside = np.array([side == 1 for side in tokens.sequence_ids(0)])
        n = len(inside)
        # As transformers 4's pipeline: the first token, for "no answer", takes its share of the probability.
        shared = inside | (np.arange(n) == 0)
        start, end = (softmax(np.where(shared, answers[f"{side}_logits"], -np.inf)) for side in ("start", "end"))
        spans = [
            (float(start[i] * end[j]), i, j)
            for i in range(n)
            for j in range(i, min(n, i + 15))
            if inside[i] and inside[j]
        ]
        score, first, last = max(spans)
        offsets = tokens["offset_mapping"][0].tolist()
        assert (got["start"], got["end"]) == (offsets[first][0], offsets[last][1])
        assert got["answer"] == context[got["start"] : got["end"]] != ""
        assert got["score"] == pytest.approx(score, abs=1e-5)
    with pytest.raises(UsageError, match=r"texts\[1\] must be a pair"):
        predict([pairs[0], "no pair"])


def test_fill_mask(opened: Opened) -> None:
    import transformers

    directory, predict = opened("fill-mask")
    expected = transformers.pipeline("fill-mask", str(directory))("the [MASK] sat", top_k=5)
    one, two, none = predict(["the [MASK] sat", "[MASK] dog [MASK]", "no mask"])
    assert [entry["token"] for entry in one[0]] == [entry["token"] for entry in expected]
    assert [entry["token_str"] for entry in one[0]] == [entry["token_str"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in one[0]], [e["score"] for e in expected], atol=1e-5)
    assert len(one) == 1 and len(two) == 2 and none == []
    # Special tokens have their names too.
    every = {entry["token"]: entry["token_str"] for entry in predict(["the [MASK] sat"], top_k=None)[0][0]}
    assert [every[number] for number in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_embeddings(opened: Opened) -> None:
    directory, predict = opened("feature-extraction", pooling="mean")
    got = predict(TEXTS)
    assert got.shape == (len(TEXTS), 32) and got.dtype == np.float32
    for text, vector in zip(TEXTS, got, strict=True):
        _, answers = plain(directory, "AutoModel", text)
        mean = answers["last_hidden_state"].mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_token_vectors(opened: Opened) -> None:
    directory, predict = opened("feature-extraction")
    for text, got in zip(TEXTS, predict(TEXTS), strict=True):
        _, answers = plain(directory, "AutoModel", text)
        np.testing.assert_allclose(got, answers["last_hidden_state"], atol=1e-4)


def test_order_is_kept_whatever_the_batches(opened: Opened) -> None:
    directory, predict = opened("feature-extraction", pooling="mean")
    texts = [" ".join(["cat", "dog", "the", "film"][i % 4] for i in range(n % 37)) for n in range(0, 500, 7)]
    expected = np.stack([predict([text])[0] for text in texts])
    small = predictor(directory, max_batch_tokens=60)
    for got in (predict(texts), small(texts), small.logits(texts)):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_long_texts_are_cut(opened: Opened) -> None:
    _, predict = opened("feature-extraction", pooling="mean")
    text = "cat " * 500
    np.testing.assert_allclose(predict([text]), predict(["cat " * 46]), atol=1e-5)


@pytest.mark.parametrize(
    "task", ["text-classification", "token-classification", "question-answering", "fill-mask", "feature-extraction"]
)
def test_nothing_in_nothing_out(opened: Opened, task: str) -> None:
    assert opened(task)[1]([]) == []


def test_no_embeddings_of_nothing(opened: Opened) -> None:
    _, predict = opened("feature-extraction", pooling="mean")
    assert predict([]).shape == (0, 32)
    assert np.isfinite(predict([""])).all()


def test_what_is_no_text_is_named(opened: Opened) -> None:
    _, predict = opened("text-classification")
    bad: list[Any] = ["fine", 3]
    with pytest.raises(TypeError, match=r"texts\[1\] must be a string, or a tuple of two strings for a pair; got int"):
        predict(bad)
    for wrong in (None, ("a",), ("a", 1), b"bytes", ["a", "b"]):
        with pytest.raises(TypeError, match=r"texts\[0\]"):
            predict([wrong])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a tuple of two strings: give a pair as"):
        predict(("question", "passage"))
    assert len(predict([("question", "passage")])) == 1 and len(predict(("a", "b", "c"))) == 3
    with pytest.raises(TypeError, match="one string: put it in a list"):
        predict("not a list")


def test_packed_answers_as_padded(tiny: Tiny, tmp_path: Path) -> None:
    for family, task, pooling in (
        ("bert", "feature-extraction", "mean"), ("roberta", "text-classification", None),
        ("bert", "token-classification", None), ("distilbert", "question-answering", None), ("bert", "fill-mask", None),
    ):  # fmt: skip
        directory = tiny(family, task, pooling)
        model = checkpoint.load(directory, task)
        packed = PackSequences(row_length=32)(model, Context(tmp_path)).model
        # Duplicates, nothing, text longer than a row and than the model, and more than one piece of the tokenizer.
        texts: list[Any] = [*TEXTS, *TEXTS[:2], "cat " * 40, "dog " * 90, "the [MASK] sat", *TEXTS * 60]
        if task == "question-answering":
            texts = [("who sat ?", f"the cat {text}") for text in texts]
        one, other = (Predictor(open_session(of, threads=1), of.spec, directory) for of in (model, packed))
        assert other.runner.session is not other.session, "packed texts are not packed twice"
        got, expected = other(texts), one(texts)
        assert len(got) == len(texts)
        if pooling:
            np.testing.assert_allclose(got, expected, atol=1e-5)
            np.testing.assert_allclose(np.stack([other([text])[0] for text in texts[:10]]), expected[:10], atol=1e-5)
        else:
            close(got, expected)


def close(got: Any, expected: Any) -> None:
    """The same nested answers, scores but for rounding."""
    assert type(got) is type(expected)
    if isinstance(got, list):
        for a, b in zip(got, expected, strict=True):
            close(a, b)
    elif isinstance(got, dict):
        for key in expected:
            close(got[key], expected[key])
    elif isinstance(got, float):
        assert got == pytest.approx(expected, abs=1e-5)
    else:
        assert got == expected


class Echo(Session):
    """Answers the sum of a text's ids and its number of tokens, and notes what is run at once. No network."""

    def __init__(self, spec: Spec, streams: int = 1) -> None:
        self.spec, self.streams = spec, streams
        self.shapes: list[tuple[int, ...]] = []
        self.running = self.most = 0

    def load(self, inputs: Mapping[str, Any]) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.inputs = inputs

    def step(self) -> None:
        self.shapes.append(self.inputs["input_ids"].shape)

    def fetch(self) -> dict[str, Any]:
        mask = self.inputs["attention_mask"]
        sums = np.stack([(self.inputs["input_ids"] * mask).sum(axis=1), mask.sum(axis=1)], axis=1)
        self.running -= 1
        return {"sentence_embedding": sums.astype(np.float32)}


def echo(tiny: Tiny, streams: int = 1, **options: Any) -> tuple[Predictor, Echo]:
    directory = tiny("bert", "feature-extraction", "mean")
    spec = checkpoint.load(directory, "auto").spec
    session = Echo(spec, streams)
    return Predictor(session, spec, directory, **{"costs": Costs(), **options}), session


def test_a_stream_keeps_order_and_holds_a_window(tiny: Tiny) -> None:
    predict, session = echo(tiny)
    count, window = 5000, 300
    words = ["cat", "dog", "the", "film", "was"]
    pulled: list[int] = []

    def source() -> Iterator[str]:
        for number in range(count):
            pulled.append(number)
            yield " ".join(words[(number >> bit) % 5] for bit in range(number % 13))

    told: list[int] = []
    held, answers = 0, []
    for number, answer in enumerate(predict.stream(source(), window, progress=told.append)):
        held = max(held, len(pulled) - number)
        answers.append(answer)
    assert len(pulled) == len(answers) == count and 0 < held <= window
    assert told == [*range(300, 5000, 300), 5000]
    expected = [sum(predict.tokenizer.encode([text])[0].ids) for text in source()]
    assert [int(answer[0]) for answer in answers] == expected
    assert max(rows * columns for rows, columns in session.shapes) <= 8192


def test_a_stream_lets_the_predictor_be_used_meanwhile(tiny: Tiny) -> None:
    predict, _ = echo(tiny)
    answers = [(first, predict(["a dog", "cat"])) for first in predict.stream((text for text in TEXTS), window=2)]
    assert len(answers) == len(TEXTS)
    np.testing.assert_array_equal(np.stack([first for first, _ in answers]), predict(TEXTS))
    assert list(predict.stream(iter([]))) == []
    with pytest.raises(TypeError, match=r"texts\[3\]"):
        list(predict.stream(iter(["a", "b", "c", 4]), window=2))  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one string"):
        predict.stream("not a list")
    with pytest.raises(TypeError, match="texts must be a list or another iterable of texts; got int"):
        predict.stream(5)  # type: ignore[arg-type]
    for window in (0, 1.5, "3", None, True):
        with pytest.raises(UsageError, match="window must be at least 1, a whole number; got"):
            predict.stream(TEXTS, window=window)  # type: ignore[arg-type]
    assert len(list(predict.stream(TEXTS, window=np.int64(3)))) == len(TEXTS)  # type: ignore[arg-type]


def test_several_threads_take_turns(tiny: Tiny) -> None:
    predict, session = echo(tiny)
    calls = [[f"{'cat ' * (i % 7)}{'dog ' * (j % 5)}" for j in range(i % 11 + 1)] for i in range(60)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(predict, calls))
    assert session.most == 1
    for call, got in zip(calls, answers, strict=True):
        np.testing.assert_array_equal(got, predict(call))


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_every_stream_gets_as_much_to_do(tiny: Tiny, streams: int) -> None:
    predict, session = echo(tiny, streams)
    lengths = sorted(np.random.default_rng(0).integers(5, 45, 12).tolist(), reverse=True)
    predict(["cat " * (n - 2) for n in lengths])
    assert sum(rows for rows, _ in session.shapes) == len(lengths)
    # Not one large batch: nearly the best of all ways to cut the sorted texts into batches.
    best = min(
        until_done([list(group) for group in cut(lengths, ends)], streams, Costs())
        for number in range(len(lengths))
        for ends in combinations(range(1, len(lengths)), number)
    )
    assert until_done([[columns] * rows for rows, columns in session.shapes], streams, Costs()) <= 1.1 * best


def cut(values: list[int], ends: tuple[int, ...]) -> list[list[int]]:
    return [values[start:end] for start, end in pairwise([0, *ends, len(values)])]


def until_done(groups: list[list[int]], streams: int, price: Costs) -> float:
    loads = [0.0] * streams
    for group in groups:
        loads[loads.index(min(loads))] += price.batch(len(group), max(group))
    return max(loads)


def test_what_is_truncated_is_said(tiny: Tiny) -> None:
    predict, session = echo(tiny)
    long, limit = "cat " * 47, 48
    answer = predict.answer(["a dog", long, "cat " * 46, "", long + long])
    assert answer.truncated == [1, 4]
    assert answer.tokens == 4 + 48 + 48 + 2 + 48
    assert answer.values[:, 1].tolist() == [4, 48, 48, 2, 48]
    alone = predict.answer([long])
    assert alone.truncated == [0] and alone.tokens == 48 and predict.answer(["cat " * 46]).truncated == []
    many = ["dog"] * 700
    many[3] = many[350] = many[699] = long
    assert predict.answer(many).truncated == [3, 350, 699]
    session.shapes.clear()
    for texts in (many[:4], many, [long]):
        number = texts.index(long)
        with pytest.raises(UsageError, match=rf"texts\[{number}\] has 49 tokens; the model takes at most {limit}"):
            predict(texts, truncate=False)
    assert not session.shapes, "nothing is run where a text is refused"
    np.testing.assert_array_equal(predict(TEXTS, truncate=False), predict(TEXTS))
    # The number is that of the whole stream; what came before is answered.
    stream = predict.stream(iter(many), window=100, truncate=False)
    with pytest.raises(UsageError, match=r"texts\[3\]"):
        next(stream)


def test_a_plan_never_pads_for_more_than_a_call_costs() -> None:
    from tests.support.specs import spec

    padded, packed = spec(max_length=512), spec(max_length=512, layout="packed", row_length=256)
    room, price = BatchLimits(32, 8192, 512), Costs(call=50.0, pair=1 / 2304)
    dice = np.random.default_rng(1)
    for lengths in (np.full(40, 128), np.full(7, 100), np.full(9, 512), dice.integers(3, 300, 200), np.array([4])):
        best = plan(padded, lengths, price, room)
        both = plan(packed, lengths, price, room)
        assert both.cost <= best.cost * 1.0001, "packing does not lose"
        for chosen in (best, both):
            bounds = [place for batch in sorted(chosen.batches) for place in batch]
            assert bounds[:1] + bounds[1::2] == [0, *bounds[2::2], len(chosen.rows.used)], "every row is in one batch"
    short = dice.integers(3, 40, 200)
    # One text a row, but hardly any padding: each batch may waste what another call would cost.
    used = -np.sort(-short)
    for start, end in plan(padded, short, price, room).batches:
        assert (used[start] - used[start:end]).sum() <= price.call
    assert BatchLimits(32, 8192, 512, 4) != room and plan(packed, short, price, BatchLimits(32, 8192, 512, 4)).cost < 0.4 * float(
        plan(packed, short, price, room).cost
    )


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_batches_are_nearly_the_best_there_are(streams: int) -> None:
    from tests.support.specs import spec

    price, room = Costs(call=46.0, pair=0.0018), BatchLimits(32, 8192, 512, streams)
    ratios = []
    for seed in range(12):
        lengths = 16 * np.random.default_rng(seed).integers(1, 17, 9)
        ordered = sorted(lengths.tolist(), reverse=True)
        best = min(
            until_done(sorted(groups, key=lambda group: -price.batch(len(group), group[0])), streams, price)
            for number in range(len(lengths))
            for ends in combinations(range(1, len(lengths)), number)
            for groups in [cut(ordered, ends)]
        )
        ratios.append(plan(spec(max_length=512), lengths, price, room).cost / best)
    assert min(ratios) > 0.999 and np.mean(ratios) <= 1.03 and max(ratios) <= 1.2, ratios


def test_costs_are_chosen_once_at_the_first_call_with_several_texts(opened: Opened, tiny: Tiny) -> None:
    directory, _ = opened("feature-extraction", pooling="mean")
    predict = predictor(directory)
    assert predict.runner.costs is None
    predict(["one text alone needs no plan"])
    assert predict.runner.costs is None
    predict(TEXTS)
    found = predict.runner.costs
    assert found == expected(predict.spec), "eager models on the CPU are batched by fixed costs"
    predict(TEXTS)
    assert predict.runner.costs is found
    fixed, session = echo(tiny)
    fixed(TEXTS)
    assert sum(rows for rows, _ in session.shapes) == len(TEXTS), "given costs are not measured"


def test_a_watcher_sees_what_was_run_as_a_padded_batch(tiny: Tiny, tmp_path: Path) -> None:
    model = checkpoint.load(tiny("bert", "feature-extraction", "mean"), "auto")
    packed = PackSequences(row_length=32)(model, Context(tmp_path)).model
    reference = open_session(model, threads=1)
    predict = Predictor(open_session(packed, threads=1), packed.spec, tiny("bert", "feature-extraction", "mean"))
    seen: list[Any] = []
    predict.watched(lambda batch, answers: seen.append(batch.padded(packed.spec, answers)))
    predict(TEXTS)
    predict(TEXTS[:1])
    predict.watched(None)
    predict(TEXTS)
    assert sum(len(inputs["input_ids"]) for inputs, _ in seen) == len(TEXTS) + 1
    for inputs, answers in seen:
        assert tuple(inputs) == model.spec.inputs
        expected = reference.run(inputs)["sentence_embedding"]
        np.testing.assert_allclose(answers["sentence_embedding"], expected, atol=1e-5)


def test_pickling_says_what_to_do_instead(opened: Opened) -> None:
    """multiprocessing pickles what it sends to a process pool; a runtime's own error names an object that nobody knows."""
    with pytest.raises(TypeError, match=r"cannot be pickled: .*call bertopt\.load once in each"):
        pickle.dumps(opened("text-classification")[1])
