"""Torch sessions on a device with a queue, and captured graphs, with a stand-in for CUDA that runs on the CPU.

What it cannot show: that CUDA accepts the capture, and that copies and kernels really overlap.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from bertopt.core import Compiled, Context, Eager
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import CaptureGraphs, CompileTorch, PackSequences
from bertopt.runtime.predictor import Predictor
from bertopt.sessions.packed import PackedSession
from bertopt.sessions.torch import TorchSession
from tests.support.tiny_models import Tiny

Outputs = tuple[torch.Tensor, ...]
GRAPHS = CaptureGraphs(smallest=64, largest=256)


class RecordedQueue:
    """Carries work out at once and writes it down. A captured graph keeps the memory that it saw: replaying reads the
    inputs' memory anew and writes the outputs' memory, as a CUDA graph does."""

    def __init__(self, capture_s: float = 0.0) -> None:
        self.log: list[str] = []
        self.capture_s = capture_s
        self.marks = 0

    def host_memory(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.log.append("allocate")
        return torch.full((elements,), -1, dtype=dtype)

    def mark(self) -> Any:
        self.marks += 1
        number = self.marks
        self.log.append(f"queued {number}")

        class Mark:
            @staticmethod
            def wait() -> None:
                self.log.append(f"waited {number}")

        return Mark()

    def wait(self) -> None:
        self.log.append("idle")

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        self.log.append("capture")
        time.sleep(self.capture_s)
        outputs = tuple(output.clone() for output in run())

        def replay() -> None:
            self.log.append("replay")
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)

        return replay, outputs


def captured(model: Eager, tmp_path: Path, graphs: CaptureGraphs = GRAPHS) -> Eager:
    packed = PackSequences(attention="varlen")(model, Context(workdir=tmp_path)).model
    return graphs(packed, Context(workdir=tmp_path, device="cuda")).model


def opened(model: Eager, queue: RecordedQueue) -> tuple[TorchSession, PackedSession]:
    session = TorchSession(model, "cpu", queue=queue)
    return session, PackedSession(session, model.spec)


def batch(model: Eager, rows: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    dice = np.random.default_rng(seed)
    mask = (np.arange(length) < dice.integers(1, length + 1, rows)[:, None]).astype(np.int64)
    ids = dice.integers(5, model.spec.vocabulary, (rows, length))
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {name: arrays[name] for name in model.spec.inputs}


def agree(model: Eager, got: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> None:
    wanted = TorchSession(model, "cpu").run(inputs)
    valid = inputs["attention_mask"] != 0
    for name in model.spec.outputs:
        chosen = slice(None) if model.spec.granularity == "text" else valid
        np.testing.assert_allclose(got[name][chosen], wanted[name][chosen], atol=1e-5)


@pytest.mark.parametrize(
    ("task", "pooling"),
    [("feature-extraction", "mean"), ("text-classification", None), ("token-classification", None), ("question-answering", None)],
)
def test_buckets_are_captured_once_and_used_again(tiny: Tiny, tmp_path: Path, task: str, pooling: str | None) -> None:
    reference = checkpoint.load(tiny("bert", task, pooling))
    queue = RecordedQueue()
    session, padded = opened(captured(reference, tmp_path), queue)
    assert session.buckets == (64, 96, 128, 192, 256)
    for seed, (rows, length) in enumerate([(3, 20), (4, 60), (2, 9), (1, 1), (3, 20), (4, 60)]):
        inputs = batch(reference, rows, length, seed)
        agree(reference, padded.run(inputs), inputs)
    assert queue.log.count("capture") == session.facts().captured_graphs
    assert queue.log.count("capture") < queue.log.count("replay") == 6
    # One batch at a time needs the memory of one batch, which is replaced only by larger.
    assert queue.log.count("allocate") <= 3 * (len(session.spec.network_inputs) + len(session.spec.outputs))


def test_the_last_text_s_pool_ends_with_it_where_every_place_holds_a_text(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the last bag reaches to the last token whatever its offset says, and took the padding behind it in."""
    bag = torch.nn.functional.embedding_bag

    def as_on_cuda(indices: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, **named: Any) -> torch.Tensor:
        return bag(indices, weight, torch.cat([offsets[:-1], offsets.new_tensor([len(indices)])]), **named)

    monkeypatch.setattr(torch.nn.functional, "embedding_bag", as_on_cuda)
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    _, padded = opened(captured(reference, tmp_path), RecordedQueue())
    inputs = batch(reference, 8, 10, 3)
    inputs["attention_mask"][:] = 1
    assert inputs["attention_mask"].sum() == 80, "8 texts in a graph of 96 tokens with 6 places, then in one of 128 with 8"
    agree(reference, padded.run(inputs), inputs)


def test_a_batch_that_is_timed_needs_no_other_compiled_graph_than_one_that_is_answered(tiny: Tiny) -> None:
    """torch.compile makes a graph for tensors of inference mode and another for those that were made outside of it."""
    reference = checkpoint.load(tiny())
    network = copy.deepcopy(reference.network)
    network.compile(backend="eager", dynamic=True)
    record = CompileTorch().record()
    compiled = Compiled(reference.spec, "float32", reference.checkpoint, network, (*reference.rewrites, record))
    for queue in (None, RecordedQueue()):
        torch._dynamo.reset()
        counters.clear()
        session = TorchSession(compiled, "cpu", queue=queue)
        for rows, length in ((1, 9), (3, 13)):
            session.run(batch(reference, rows, length))
        graphs = counters["stats"]["unique_graphs"]
        for rows, length in ((1, 9), (3, 13)):
            session.load(batch(reference, rows, length))
            session.step()
        shown = CompileTorch().effects(compiled, session.facts())
        assert counters["stats"]["unique_graphs"] == graphs == 2
        assert shown["graphs for shapes not seen before"] == (0, 0)


def test_what_a_compiled_network_is_tuned_for_does_not_depend_on_the_first_text(tiny: Tiny) -> None:
    """torch.compile chooses kernels for the first sizes that it sees: a predictor's were 2 texts of 16 tokens, a check's others."""
    reference = checkpoint.load(tiny())
    seen: list[tuple[int, ...]] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        seen.extend(tuple(value.shape) for value in inputs if torch.is_tensor(value) and value.dtype == torch.int64)
        return graph.forward

    network = copy.deepcopy(reference.network)
    network.compile(backend=compiler, dynamic=True)
    record = CompileTorch().record()
    torch._dynamo.reset()
    session = TorchSession(Compiled(reference.spec, "float32", reference.checkpoint, network, (*reference.rewrites, record)), "cpu")
    session.run(batch(reference, 2, 9))
    # The positions are a buffer of the network.
    assert set(seen) - {(1, reference.spec.max_length)} == {(8, min(128, reference.spec.max_length))}


def test_few_texts_get_a_graph_with_few_places(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    queue = RecordedQueue()
    session, padded = opened(captured(reference, tmp_path, CaptureGraphs(largest=2048)), queue)
    graphs = session._graphs
    assert graphs is not None
    for rows, length, places in ((5, 60, 24), (16, 60, 16), (30, 33, 32), (60, 17, 64)):
        inputs = batch(reference, rows, length, rows)
        inputs["attention_mask"][:] = 1
        agree(reference, padded.run(inputs), inputs)
        assert any(held == places for _, held in graphs._graphs)
    assert session.facts().captured_graphs == 2 and queue.log.count("capture") == 4


def test_outputs_stay_when_the_graph_is_replayed(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    _, padded = opened(captured(reference, tmp_path), RecordedQueue())
    inputs = [batch(reference, 3, 12, seed) for seed in range(5)]
    outputs = list(padded.run_all(inputs))
    for got, asked in zip(outputs, inputs, strict=True):
        agree(reference, got, asked)


def test_more_than_the_largest_runs_without_a_graph(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "token-classification"))
    queue = RecordedQueue()
    _, padded = opened(captured(reference, tmp_path, CaptureGraphs(smallest=64, largest=64)), queue)
    for rows, length in ((2, 60), (5, 2)):
        inputs = batch(reference, rows, length)
        inputs["attention_mask"][:] = 1
        agree(reference, padded.run(inputs), inputs)
    # 120 tokens are too many for the one size, and so are 5 texts.
    assert "capture" not in queue.log and "replay" not in queue.log


def test_ten_thousand_empty_texts_and_some_longer(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    queue = RecordedQueue()
    session, padded = opened(captured(reference, tmp_path, CaptureGraphs(largest=4096)), queue)
    padded.asynchronous = True
    predictor = Predictor(padded, session.spec, reference.checkpoint)
    texts = ["", "a cat sat"] + [""] * 9_998 + ["the dog ran . " * 40]
    embeddings = predictor(texts)
    plain = Predictor(TorchSession(reference, "cpu"), reference.spec, reference.checkpoint)
    wanted = plain(["", "a cat sat", "the dog ran . " * 40])
    np.testing.assert_allclose(embeddings[:2], wanted[:2], atol=1e-5)
    np.testing.assert_allclose(embeddings[2:-1], np.repeat(wanted[:1], 9_998, axis=0), atol=1e-5)
    np.testing.assert_allclose(embeddings[-1:], wanted[2:], atol=1e-5)
    # Every batch had a graph of its size.
    assert queue.log.count("replay") == queue.marks


def test_one_thread_captures_while_another_asks(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    queue = RecordedQueue(capture_s=0.02)
    session, padded = opened(captured(reference, tmp_path), queue)
    predictor = Predictor(padded, session.spec, reference.checkpoint)
    texts = [f"{'the cat sat on the mat ' * (number % 9)}{number}" for number in range(48)]
    plain = Predictor(TorchSession(reference, "cpu"), reference.spec, reference.checkpoint)(texts)
    wrong: list[str] = []
    start = threading.Barrier(6)

    def ask(first: int) -> None:
        start.wait()
        for number in range(first, 48, 6):
            window = slice(number, number + 1 + number % 4)
            if not np.allclose(predictor(texts[window]), plain[window], atol=1e-5):
                wrong.append(texts[number])

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert queue.log.count("capture") == session.facts().captured_graphs


def test_graphs_are_captured_ahead_largest_first(tiny: Tiny, tmp_path: Path) -> None:
    model = captured(checkpoint.load(tiny()), tmp_path, CaptureGraphs(largest=256, ahead=True))
    queue = RecordedQueue()
    session, _ = opened(model, queue)
    assert queue.log.count("capture") == 5
    shown = CaptureGraphs(largest=256, ahead=True).effects(model, session.facts())
    assert all(expected == got for expected, got in shown.values())


def test_two_batches_are_in_flight(tiny: Tiny) -> None:
    model = checkpoint.load(tiny("bert", "feature-extraction"))
    queue = RecordedQueue()
    session = TorchSession(model, "cpu", queue=queue)
    taken: list[int] = []

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for number in range(4):
            taken.append(number)
            queue.log.append(f"taken {number + 1}")
            yield batch(model, 2, 6 + number, number)

    for number, got in enumerate(session.run_all(batches())):
        agree(model, got, batch(model, 2, 6 + number, number))
    order = [entry for entry in queue.log if entry != "allocate"]
    assert order == [
        "taken 1", "queued 1", "taken 2", "queued 2", "waited 1", "taken 3", "queued 3", "waited 2",
        "taken 4", "queued 4", "waited 3", "waited 4",
    ]  # fmt: skip


def test_the_clock_sees_a_step_that_waits_for_the_device(tiny: Tiny, tmp_path: Path) -> None:
    reference = checkpoint.load(tiny())
    for model in (reference, captured(reference, tmp_path)):
        queue = RecordedQueue()
        session = TorchSession(model, "cpu", queue=queue)
        padded = PackedSession(session, model.spec) if model.spec.one_row else session
        inputs = batch(reference, 3, 12)
        inputs["attention_mask"][:, 0] = 1
        padded.load(inputs)
        queue.log.clear()
        padded.step()
        assert queue.log[-1] == "idle" and not any("queued" in entry for entry in queue.log)
        agree(reference, padded.fetch(), inputs)


def test_what_cannot_be_captured_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    varlen = PackSequences(attention="varlen")
    assert "attention: varlen" in (CaptureGraphs().conflict([PackSequences()]) or "")
    assert CaptureGraphs().conflict([varlen]) is None
    assert "need a GPU" in (CaptureGraphs().device_conflict("cpu", [varlen]) or "")
    assert "captures the forward itself" in (CompileTorch(mode="reduce-overhead").conflict([varlen, CaptureGraphs()]) or "")
    model = checkpoint.load(tiny())
    with pytest.raises(Unsupported, match="need a GPU"):
        TorchSession(captured(model, tmp_path), "cpu")
    with pytest.raises(Unsupported, match="varlen"):
        CaptureGraphs()(model, Context(workdir=tmp_path, device="cuda"))
    with pytest.raises(ValueError, match="multiples of 64"):
        CaptureGraphs(smallest=128, largest=64)


def test_a_pooled_network_gives_its_tokens_to_an_exporter_alone(tiny: Tiny) -> None:
    network: Any = checkpoint.load(tiny("bert", "feature-extraction", "mean")).network
    assert network.outputs == ("sentence_embedding",) and len(network(*network.example(2, 4))) == 1
    network.gives_tokens = True
    assert network.outputs == ("sentence_embedding", "last_hidden_state") and len(network(*network.example(2, 4))) == 2
