"""Measure two committed stages or artefacts side by side: the second against the first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bertopt import stages
from bertopt.checks.measurements import StageMeasurements
from bertopt.errors import UsageError, WrongAnswer
from bertopt.modeling.sentence_transformers import read_prompts
from bertopt.pipeline.examiner import Examiner
from bertopt.pipeline.measurement_plan import MeasurementPlan
from bertopt.pipeline.own_texts import fitting
from bertopt.pipeline.progress import ProgressCallback
from bertopt.pipeline.race import Budget
from bertopt.recipe.texts import Texts
from bertopt.runtime.replay import PAIRS
from bertopt.runtime.same_tokens import AWKWARD, counting
from bertopt.stages import contents
from bertopt.system.untrusted import plain
from bertopt.workers.client import Workers
from bertopt.workers.remote_tokenizer import RemoteTokenizer

#: Shapes [B, S] for stage directories, whose manifests name none.
SHAPES = ((1, 16), (8, 128))


def measure(
    workers: Workers, first: Path, second: Path, texts: Texts, shapes: Sequence[tuple[int, int]], records: Path,
    on_progress: ProgressCallback, budget: Budget | None = None,
) -> tuple[StageMeasurements, StageMeasurements, Examiner]:
    """Return measurements of both, the second's against the first, and the examiner that can show its worst case; `budget` is for timing.

    Raises UsageError where the two are not comparable, WrongAnswer where they tokenise texts or word answers differently, whatever their
    outputs are, Unsupported where this machine cannot open one.
    """
    ours, theirs = stages.read_manifest(first), stages.read_manifest(second)
    spec, other = ours.spec, theirs.spec
    if (spec.task, spec.inputs, spec.outputs, spec.embedding_size) != (other.task, other.inputs, other.outputs, other.embedding_size):
        raise UsageError(
            f"'{first}' is another kind of model ({spec.family}, {spec.task}, {', '.join(spec.inputs)}) than "
            f"'{second}' ({other.family}, {other.task}, {', '.join(other.inputs)}); compare models of one checkpoint"
        )
    if ours.device != theirs.device:
        raise UsageError(
            f"one is for {ours.device}, the other for {theirs.device}; compare models for one device"
        )
    texts.check_labels(spec)
    with workers.start() as worker:
        texts = fitting(worker, first.resolve(), texts)
    plan = MeasurementPlan.of(spec, shapes, texts, budget or Budget())
    examiner = Examiner(workers, first.resolve(), theirs.device, plan, records, {}, on_progress)
    try:
        _check_alike(workers, examiner, first, second)
        baseline = examiner.measure(name(ours), first.resolve(), None)
        candidate = examiner.sweep(name(theirs), second.resolve(), first.resolve())
        # The candidate's memory is that of the sweeps too, whose rows the first artefact has run by now.
        return examiner.with_peaks(baseline, first.resolve()), candidate, examiner
    finally:
        examiner.close()


def _check_alike(workers: Workers, examiner: Examiner, first: Path, second: Path) -> None:
    """Raise WrongAnswer where the labels, lengths, prompts, vocabularies or tokens of two models differ.

    Outputs do not depend on the first three, and in reduced precision may hide the others.
    """
    spec, other = (stages.read_manifest(path).spec for path in (first, second))
    contents.check_said(spec, other, f"{{}} must be the same in '{first}' and '{second}'; got {{}} and {{}}: their answers differ, whatever their outputs are")
    prompts, others = read_prompts(first), read_prompts(second)
    if different := sorted(name for name in prompts.keys() | others.keys() if prompts.get(name) != others.get(name)):
        what, (one, two) = different[0], (found.get(different[0]) for found in (prompts, others))
        raise WrongAnswer(f"prompt '{plain(what)}' must be the same in '{first}' and '{second}'; got {plain(repr(one))} and {plain(repr(two))}")
    words, other_words = _vocabulary(first), _vocabulary(second)
    if unlike := sorted(word for word in words.keys() | other_words.keys() if words.get(word) != other_words.get(word)):
        word = unlike[0]
        ids = f"{plain(repr(word))} is {words.get(word)} in one and {other_words.get(word)} in the other"
        raise WrongAnswer(f"'{first}' and '{second}' must have one vocabulary; {ids}")
    theirs = RemoteTokenizer(workers, second.resolve())
    try:
        for text in (*AWKWARD, *PAIRS, counting(spec.max_length)):
            expected, got = examiner.tokenizer.batch([text]), theirs.batch([text])
            if any(expected[name].tolist() != got[name].tolist() for name in spec.inputs):
                ids, other_ids = (found["input_ids"][0][:12].tolist() for found in (expected, got))
                raise WrongAnswer(f"'{first}' and '{second}' must read texts as the same tokens; {text!r:.60} is {ids} in one and {other_ids} in the other")
    finally:
        theirs.close()


def _vocabulary(directory: Path) -> dict[str, int]:
    """Return the id of each token in the vocabulary: only a few tokens occur in the texts that are compared. (All versions of the libraries
    write this part of tokenizer.json in the same way.)"""
    fields = json.loads((directory / "tokenizer.json").read_bytes())
    words = fields["model"]["vocab"]
    # Unigram models have a list of tokens with their probabilities.
    numbered = words if isinstance(words, dict) else {word: number for number, (word, _) in enumerate(words)}
    return {**numbered, **{token["content"]: token["id"] for token in fields.get("added_tokens", ())}}


def name(manifest: stages.Manifest) -> str:
    """Return the name of the stage that an artefact was made from, or of a stage itself."""
    return str(manifest.stage or manifest.name)


def shapes(manifest: stages.Manifest) -> list[tuple[int, int]]:
    """Return the shapes [B, S] that an artefact was checked on; for a stage `SHAPES`, cut to the model's longest sequence."""
    stated = (manifest.recipe or {}).get("inputs", {}).get("shapes")
    longest = manifest.spec.max_length
    return [(batch, sequence) for batch, sequence in stated] if stated else [(batch, min(sequence, longest)) for batch, sequence in SHAPES]
