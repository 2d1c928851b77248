"""A worker's operations on an open stage: run it, time it, examine it. `build_operations` has the others."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from bertopt import stages
from bertopt.checks import timed_steps
from bertopt.core import Device, Eager, HalfRounding, Int8Rounding, Model, Precision, Rewrite, Session
from bertopt.modeling.packing import Batch
from bertopt.runtime import text_inputs
from bertopt.runtime.own_texts import own_texts
from bertopt.runtime.predictor import Predictor, mask_id
from bertopt.runtime.tokenization import Tokenizer
from bertopt.stages.opening import opening
from bertopt.system import environment, gpu
from bertopt.system.untrusted import reading
from bertopt.workers import protocol
from bertopt.workers.build_operations import BuildOps, Reply

if TYPE_CHECKING:
    from bertopt.core import Array


class Ops(BuildOps):
    """The operations by name (`op_…`). Holds at most one open session."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.model: Model | None = None
        self.passes: list[Rewrite] = []
        self.predictor: Predictor | None = None
        self.tokenizer: Tokenizer | None = None
        self.texts: list[Any] = []
        self.rng = np.random.default_rng(0)
        self.samples = timed_steps.ReservoirSample(self.rng)
        self.turns = 0
        self.torch_threads: int | None = None
        self.gpu_used: int | None = None

    def __call__(self, message: Mapping[str, Any], arrays: dict[str, Array]) -> Reply:
        op: Callable[..., Reply] = getattr(self, f"op_{message['op']}")
        return op(arrays=arrays, **message["args"])

    def op_open_twin(
        self, arrays: Mapping[str, Array], directory: str, device: Device, precision: Precision, how: Mapping[str, Any] | HalfRounding, draw: int,
        batches: int,
    ) -> Reply:  # fmt: skip
        """Open the reference with the rounding of `precision` simulated, as `rounding.simulate` has it.

        `arrays` are the numbered `batches` that static scales are calibrated on.
        """
        from bertopt.modeling import rounding
        from bertopt.sessions import open_session

        model: Any = stages.open_stage(Path(directory), stages.verify(Path(directory)))
        self.session = session = open_session(model, device)
        calibrated = protocol.by_number(arrays, batches)
        rounds = how if isinstance(how, str) else Int8Rounding(**how)
        rounding.simulate(model.network, precision, rounds, draw, lambda: [session.run(inputs) for inputs in calibrated])
        return None, {}

    def op_open(self, arrays: Any, directory: str, device: Device) -> Reply:
        """Verify a committed stage and open a session and a predictor on it, as `bertopt.load` does."""
        from bertopt.sessions import open_session

        with opening(Path(directory)) as opened:
            manifest = opened.manifest
            environment.check_isa(manifest.form, manifest.precision, manifest.environment["isa"], device)
            model = stages.open_stage(opened.path, manifest)
            if device == "cuda" and (state := gpu.state()) is not None:
                self.gpu_used = state.used_bytes
            self.session, self.model = open_session(model, device), model
            self.passes = list(manifest.passes)
            self.predictor = Predictor(self.session, model.spec, opened.path, model.shapes)
            opened.keep_for(self)
        return {"shapes": model.shapes.model_dump(mode="json"), "layout": model.spec.layout}, {}

    def op_reduce(self, arrays: Any, kind: Literal["tf32", "bfloat16"]) -> Reply:
        """Let torch run the open network in less precision, for the rest of this process."""
        import torch

        from bertopt.passes import CastHalf

        assert isinstance(self.model, Eager), "op_open comes first"
        if kind == "tf32":
            torch.set_float32_matmul_precision("high")
        else:
            CastHalf(dtype="bfloat16").rewrite(self.model.network)
        return None, {}

    def op_tokenizer(self, arrays: Any, directory: str) -> Reply:
        """Open the tokenizer of a committed stage for `encode` and `word`."""
        with opening(Path(directory)) as opened, reading("tokenizer.json", "export again"):
            self.tokenizer = Tokenizer(opened.path, opened.manifest.spec, opened.manifest.spec.max_length)
        return None, {}

    def op_encode(self, arrays: Any, texts: list[Any]) -> Reply:
        """Return texts as right-padded arrays [B, S]."""
        assert self.tokenizer is not None, "op_tokenizer comes first"
        return None, self.tokenizer.batch(self.tokenizer.encode(text_inputs.from_json(texts)))

    def op_mask(self, arrays: Any, directory: str) -> Reply:
        """Return the mask token's spelling and id."""
        assert self.tokenizer is not None, "op_tokenizer comes first"
        number = mask_id(Path(directory), self.tokenizer)
        return [str(self.tokenizer.fast.id_to_token(number)), number], {}

    def op_own_texts(self, arrays: Any, directory: str) -> Reply:
        """Return texts of the tokenizer's own words, where it knows few of the built-in ones; see `vocabulary_texts`."""
        with opening(Path(directory)) as opened, reading("tokenizer.json", "export again"):
            return own_texts(opened.path, opened.manifest.spec), {}

    def op_word(self, arrays: Any, token: int) -> Reply:
        assert self.tokenizer is not None, "op_tokenizer comes first"
        return str(self.tokenizer.fast.id_to_token(token) or token), {}

    def op_run(self, arrays: dict[str, Array]) -> Reply:
        return None, self._session.run(arrays)

    def op_load(self, arrays: dict[str, Array]) -> Reply:
        self._session.load(arrays)
        return None, {}

    def op_fetch(self, arrays: Any) -> Reply:
        return None, self._session.fetch()

    def op_step(self, arrays: Any) -> Reply:
        self._session.step()
        return None, {}

    def op_time(self, arrays: Any, shape: list[int], steps: int) -> Reply:
        """Time `steps` steps [ms] on fresh inputs [B, S]; also the work unfinished when one step's clock stopped [ms]."""
        assert self.predictor is not None
        batches = [timed_steps.random_inputs(self.predictor.spec, (shape[0], shape[1]), self.rng) for _ in range(steps)]
        step_ms, unfinished_ms, sample = timed_steps.time_steps(self._session, batches, int(self.rng.integers(steps)))
        self.samples.add(sample)
        return {"step_ms": step_ms, "unfinished_ms": unfinished_ms}, {}

    def op_mix(self, arrays: Any, texts: list[Any]) -> Reply:
        """Keep the texts that `time_mix` sends through the predictor."""
        self.texts = text_inputs.from_json(texts)
        return None, {}

    def op_time_mix(self, arrays: Any, steps: int) -> Reply:
        """Time `steps` passes of all texts through the predictor [ms], their words rotated each time."""
        assert self.predictor is not None
        step_ms = []
        keep = int(self.rng.integers(steps))
        kept: list[tuple[Batch, Mapping[str, Array]]] = []
        for step in range(steps):
            self.turns += 1
            texts = [timed_steps.rotate_words(text, self.turns) for text in self.texts]
            if step == keep:
                self.predictor.watched(lambda batch, answers: kept.append((batch, answers)))
            start = time.perf_counter_ns()
            self.predictor(texts)
            step_ms.append((time.perf_counter_ns() - start) / 1e6)
            self.predictor.watched(None)
            # Copy before the next step: the session may use the same memory again.
            for batch, answers in kept:
                self.samples.add(batch.padded(self.predictor.spec, answers))
            kept.clear()
        return {"step_ms": step_ms, "unfinished_ms": 0.0}, {}

    def op_sampled(self, arrays: Any) -> Reply:
        """Return the timed runs sampled since the last call: their number, and for each its inputs, then its outputs."""
        kept = self.samples.take()
        return len(kept), protocol.numbered(part for sample in kept for part in sample)

    def op_effects(self, arrays: Any) -> Reply:
        """Return the effects that the open stage shows, of its last pass (`own`) and of any pass (`placed`): counts expected and seen."""
        from bertopt.stages import effects

        assert self.model is not None
        found = effects.ask(self.model, self.passes, self._session.facts())
        return {"own": found.own, "placed": found.placed, "proven": found.proven}, {}

    def op_certify(self, arrays: Any, parent: str, beside: bool, same_build: bool) -> Reply:
        """Compare the open stage's weights with those of the stage in `parent`, or, if `beside`, of another artefact of the checkpoint."""
        from bertopt.stages import certificates

        assert self.model is not None
        other = stages.open_stage(Path(parent))
        found = certificates.between(self.model, other, same_build) if beside else certificates.certify(self.model, other)
        return found.model_dump(), {}

    def op_fingerprint(self, arrays: Any) -> Reply:
        """Return the open model's hash, which is its parent's if the pass changed nothing."""
        from bertopt.stages.fingerprint import fingerprint

        assert self.model is not None
        return fingerprint(self.model), {}

    def op_logits(self, arrays: Any, texts: list[Any]) -> Reply:
        """Return the outputs [N, D] for texts and pairs, of a model with one vector for each text."""
        assert self.predictor is not None
        return None, {"logits": self.predictor.logits(text_inputs.from_json(texts))}

    def op_outputs(self, arrays: Any, texts: list[Any], alone: list[int]) -> Reply:
        """Return the raw outputs of texts and pairs in one call, as `<number>/<output>`, and of the texts with the numbers `alone` in a separate
        call each, as `<number>/<output>, alone`; of wide outputs only the columns that coverage sweeps compare."""
        from bertopt.checks import coverage
        from bertopt.runtime import single_calls

        assert self.predictor is not None and self.model is not None
        given = text_inputs.from_json(texts)
        # For fill-mask only alone: the outputs of all texts over a vocabulary would take gigabytes.
        together = [] if self.model.spec.task == "fill-mask" else self.predictor.raw(given)
        separate = single_calls.answers(self.predictor, [given[number] for number in alone])
        found = {}
        for how, numbered in (("", enumerate(together)), (", alone", zip(alone, separate, strict=True))):
            for number, named in numbered:
                found.update({f"{number}/{name}{how}": coverage.narrowed(value, 0) for name, value in named.items()})
        return None, found

    def op_answers(self, arrays: Any, texts: list[Any]) -> Reply:
        """Return the predictor's answers to texts and pairs."""
        assert self.predictor is not None
        return self.predictor(text_inputs.from_json(texts)), {}

    def op_replay(self, arrays: Any) -> Reply:
        """Return the open stage's outputs for the texts that an artefact records."""
        from bertopt.runtime import replay

        assert self.predictor is not None and self.model is not None
        return replay.answers(self.predictor, self.model.form == "compiled"), {}

    def op_weights(self, arrays: Any) -> Reply:
        """Return figures of the open stage's weights; None where these are just its files."""
        from bertopt.runtime import weight_figures

        assert self.predictor is not None
        return weight_figures.figures(self.predictor.runner.session), {}

    def op_cover(self, arrays: dict[str, Array], probes: list[dict[str, Any]], seed: int) -> Reply:
        """Run coverage sweeps. Their inputs and compared places are named `<number>/<name>`, and so are the vectors returned."""
        from bertopt.checks import coverage
        from bertopt.sessions import shipped

        assert self.model is not None
        run = shipped.runner(self._session, self.model)
        return coverage.run_sweeps(run, self.model.spec, self.model.shapes, probes, arrays, seed)

    def op_torch_threads(self, arrays: Any, threads: int | None) -> Reply:
        """Set torch's number of threads; None restores the one that the worker began with."""
        import torch

        self.torch_threads = self.torch_threads or torch.get_num_threads()
        torch.set_num_threads(threads or self.torch_threads)
        return None, {}

    def op_stats(self, arrays: Any) -> Reply:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_rss_bytes": rss, "peak_gpu_bytes": self._gpu_bytes(), "facts": self._session.facts().model_dump(exclude_none=True)}, {}

    def _gpu_bytes(self) -> int | None:
        """Return the GPU memory of this process; without NVML only what torch allocated."""
        try:
            import torch
        except ModuleNotFoundError:  # an environment that only runs artefacts
            return None
        if not torch.cuda.is_available():
            return None
        torchs = int(torch.cuda.max_memory_reserved())
        return max(torchs, gpu.memory_of(os.getpid(), self.gpu_used) or 0)

    @property
    def _session(self) -> Session:
        assert self.session is not None, "op_open comes first"
        return self.session
