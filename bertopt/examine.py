"""Examine committed stages: each in a fresh worker, against the reference and against its parent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertopt.checks import latency, parity, probes, quality
from bertopt.checks.latency import Contender
from bertopt.checks.parity import Answers
from bertopt.core import Device, Spec
from bertopt.errors import Unsupported
from bertopt.results import Case, Comparison, Latency, Limits, Quality, Stage
from bertopt.runtime.tokens import Text, Tokenizer
from bertopt.texts import Texts
from bertopt.worker import RemoteSession, Worker, Workers

#: Texts in one turn of the mix, taken evenly from the recipe's.
MIX_TEXTS = 12
#: Seconds of timing for each shape, and for the mix.
SHAPE_BUDGET_S, MIX_BUDGET_S = 1.5, 4.0


#: Answers of earlier stages are kept for their children up to this much memory, and computed again beyond it.
ANSWER_BYTES = 64 * 2**20


class Examiner:
    """Holds the probes and the reference's answers for one run, and the few workers worth keeping open."""

    def __init__(
        self, workers: Workers, reference: Path, spec: Spec, device: Device, shapes: Sequence[tuple[int, int]],
        texts: Texts, records: Path, machine: dict[str, Any], tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.workers, self.reference, self.spec, self.device = workers, reference, spec, device
        self.shapes, self.texts, self.records, self.tell = list(shapes), texts, records, tell
        tokenizer = Tokenizer(reference, spec, spec.max_length)
        sample = (
            list(dict.fromkeys([*texts.texts[:64], *probes.built_in_texts()])) if texts.source else list(texts.texts)
        )
        self.probes = [
            *probes.grid(spec, shapes, None),
            *probes.texts(spec, lambda batch: [tokenizer.batch(tokenizer.encode(list(batch)))], sample),
        ]
        step = max(1, len(texts.texts) // MIX_TEXTS)
        pairs = spec.task == "question-answering"
        self.mix: list[Text] = [("what?", text) if pairs else text for text in texts.texts[::step]][:MIX_TEXTS]
        self._key = [probes.digest(self.probes), texts.digest, self.mix, device, shapes, machine]
        self._open: dict[Path, Worker] = {}
        self._answers: dict[Path, dict[str, Answers]] = {}
        self._reference_value: float | None = None

    def examine(self, row: Stage, directory: Path, parent: Path | None, limits: Limits, timeout: float | None) -> None:
        """Fill in parity, latency, quality and memory of `row`, measured now or recorded for the same inputs.

        Raises Unsupported where this machine cannot open the stage, and what its worker raises.
        """
        is_reference = parent is None
        record = self.records / f"{self._record_key(directory, parent)}.json"
        if record.is_file():
            found = json.loads(record.read_text("utf-8"))
        else:
            found = self._measure(row.name, directory, parent, timeout)
            record.parent.mkdir(exist_ok=True)
            part = record.with_suffix(".part")
            part.write_text(json.dumps(found), "utf-8")
            part.replace(record)
        cases = [Case.model_validate(case) for case in found["cases"]]
        vs_parent = Comparison.model_validate(found["vs_parent"]) if found["vs_parent"] else None
        row.parity = None if is_reference else parity.judge(cases, limits, vs_parent)
        row.latency = [Latency.model_validate(case) for case in found["latency"]]
        row.quality = Quality.model_validate(found["quality"]) if found["quality"] else None
        if is_reference and row.quality:
            self._reference_value = row.quality.value
        row.facts, row.peak_rss_bytes, row.peak_gpu_bytes = (
            found["facts"],
            found["peak_rss_bytes"],
            found["peak_gpu_bytes"],
        )

    def close(self) -> None:
        for worker in self._open.values():
            worker.close()
        self._open.clear()

    def _record_key(self, directory: Path, parent: Path | None) -> str:
        names = [directory.name, parent.name if parent else None, self.reference.name]
        return hashlib.sha256(json.dumps([names, self._key]).encode()).hexdigest()

    def _measure(self, name: str, directory: Path, parent: Path | None, timeout: float | None) -> dict[str, Any]:
        self.tell(f"{name}: opening")
        keep = {self.reference, parent, directory}
        for path in [path for path in self._open if path not in keep]:
            self._open.pop(path).close()
        while len(self._answers) > 2 and sum(map(_bytes, self._answers.values())) > ANSWER_BYTES:
            del self._answers[next(path for path in self._answers if path not in keep)]
        worker, max_shape = self._worker(directory, timeout)
        self.tell(f"{name}: parity")
        cases: list[Case] = []
        between: list[Case] = []
        if parent is not None:
            mine = self._answers_of(directory, timeout)
            reference = self._answers_of(self.reference, timeout)
            theirs = self._answers_of(parent, timeout)
            for probe in self.probes:
                if probe.name in mine:
                    cases.append(parity.compare(probe, self.spec, mine[probe.name], reference[probe.name]))
                if probe.name in mine and probe.name in theirs:
                    between.append(parity.compare(probe, self.spec, mine[probe.name], theirs[probe.name]))
            if not cases:
                raise Unsupported(f"no probe fits the engine's largest shape {max_shape}; widen its profiles")
        figures = self._quality(name, worker, timeout)
        self.tell(f"{name}: latency")
        timed = self._race(worker, parent, max_shape, timeout)
        stats = worker.call("stats", timeout=timeout)
        return {
            "cases": [case.model_dump() for case in cases],
            "vs_parent": parity.summarise(between).model_dump() if between else None,
            "latency": [case.model_dump(mode="json") for case in timed],
            "quality": figures.model_dump() if figures else None,
            **stats,
        }

    def _worker(self, directory: Path, timeout: float | None) -> tuple[Worker, tuple[int, int] | None]:
        if directory not in self._open or not self._open[directory].alive:
            worker = self.workers.start()
            try:
                opened = worker.call("open", timeout=timeout, directory=str(directory), device=self.device)
            except BaseException:
                worker.kill()
                raise
            worker.max_shape = tuple(opened["max_shape"]) if opened["max_shape"] else None
            self._open[directory] = worker
        worker = self._open[directory]
        return worker, worker.max_shape

    def _answers_of(self, directory: Path, timeout: float | None) -> dict[str, Answers]:
        """Answers by probe name, for every probe that the stage's largest shape admits."""
        if directory not in self._answers:
            worker, max_shape = self._worker(directory, timeout)
            session = RemoteSession(worker, timeout)
            self._answers[directory] = {
                probe.name: parity.answer(session, probe, self.spec)
                for probe in self.probes
                if _fits(probe.shape, max_shape)
            }
        return self._answers[directory]

    def _quality(self, name: str, worker: Worker, timeout: float | None) -> Quality | None:
        if self.texts.labels is None or self.spec.task != "text-classification":
            return None
        self.tell(f"{name}: {len(self.texts.texts)} labelled texts")
        logits = worker.exchange("logits", timeout=timeout, texts=list(self.texts.texts))[1]["logits"]
        return quality.measure(self.spec, logits, self._reference_value, self.texts.labels)

    def _race(
        self, worker: Worker, parent: Path | None, max_shape: tuple[int, int] | None, timeout: float | None
    ) -> list[Latency]:
        """Time the stage, the reference and the parent against each other on every shape, and on the mix."""
        racing = {"stage": worker}
        if parent is not None:
            racing["reference"] = self._worker(self.reference, timeout)[0]
            if parent != self.reference:
                racing["parent"] = self._worker(parent, timeout)[0]
        for other in racing.values():
            other.pause()
        try:
            found = []
            for shape in self.shapes:
                if _fits(shape, max_shape):
                    found.append(self._race_one(racing, shape, parent, timeout))
            found.append(self._race_one(racing, None, parent, timeout))
            return found
        finally:
            for other in racing.values():
                other.resume()

    def _race_one(
        self, racing: dict[str, Worker], shape: tuple[int, int] | None, parent: Path | None, timeout: float | None
    ) -> Latency:
        contenders = {}
        for role, worker in racing.items():
            worker.resume()
            if shape is None:
                worker.call("mix", timeout=timeout, texts=self.mix)
                turn = _mix_turn(worker, timeout)
            else:
                probe = next(
                    p for p in probes.grid(self.spec, [shape], None) if p.padding == "none" and p.shape == shape
                )
                worker.call("load", probe.inputs, timeout)
                turn = RemoteSession(worker, timeout).time
            worker.pause()
            contenders[role] = Contender(role, turn, worker.resume, worker.pause, _graphs(worker, timeout))
        latency.race(list(contenders.values()), SHAPE_BUDGET_S if shape else MIX_BUDGET_S)
        reference = contenders.get("reference")
        against = contenders.get("parent", reference) if parent is not None else None
        return latency.measure(contenders["stage"], shape, len(self.mix), reference, against)


def _mix_turn(worker: Worker, timeout: float | None) -> Callable[[int], list[float]]:
    def turn(steps: int) -> list[float]:
        taken: list[float] = worker.call("time_mix", timeout=timeout, steps=steps)
        return taken

    return turn


def _graphs(worker: Worker, timeout: float | None) -> Callable[[], int]:
    return lambda: int(worker.call("stats", timeout=timeout)["facts"].get("graphs", 0))


def _bytes(answers: dict[str, Answers]) -> int:
    return sum(array.nbytes for kept, _ in answers.values() for array in kept.values())


def _fits(shape: tuple[int, int], max_shape: tuple[int, int] | None) -> bool:
    return max_shape is None or (shape[0] <= max_shape[0] and shape[1] <= max_shape[1])
