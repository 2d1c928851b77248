"""What an artefact is held to beside another one, and what the two cannot show without their checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from bertopt.checks import coverage, gates, padding_patterns, parity
from bertopt.checks.measurements import StageMeasurements
from bertopt.errors import WrongAnswer
from bertopt.report.diff import Change
from bertopt.results import Failure, Limits
from bertopt.results.fidelity import Certificate
from bertopt.runtime import replay
from bertopt.stages import certificates
from bertopt.stages.manifest import Manifest

#: From the most exact to the least exact.
_PRECISIONS = ("float32", "float16", "bfloat16", "float8", "int8")
#: Limits whose figures `diff.artefacts` shows and judges.
_SHOWN = ("max_abs", "rel_l2", "cosine_min", "cosine_mean", "label_flips_max")


def limits(before: Manifest, after: Manifest, stated: Limits, peak: float) -> Limits:
    """Return the limits of `after` beside `before`: the two may differ as much as the less exact one may differ from the checkpoint."""
    coarser = max(before.precision, after.precision, key=_PRECISIONS.index)
    return gates.effective_limits(coarser, stated, peak=peak, sparse=after.spec.sparse)


def of_one_checkpoint(before: Manifest, after: Manifest) -> bool:
    return before.checkpoint_sha256 is not None and before.checkpoint_sha256 == after.checkpoint_sha256


def holds_checkpoint(before: Manifest, after: Manifest) -> bool:
    """Return whether the files of `before` are the checkpoint that `after` was made from too: a torch network's are, unless a pass of the
    user's own wrote them."""
    own = any(name.startswith("pass ") for name in before.sources or {})
    return before.form in ("eager", "compiled") and of_one_checkpoint(before, after) and not own


def changes(before: Manifest, after: Manifest, new: StageMeasurements, held: Limits, directory: str) -> Iterator[Change]:
    """Yield what `diff.artefacts` does not judge of `new`, measured of `after` beside `before`."""
    name = str(after.stage or after.name)
    failures = coverage.failures(new.coverage, held) if new.coverage else []
    if of_one_checkpoint(before, after):
        failures += _rounded_alike(before, after, new, held)
    for failure in failures:
        yield Change(stage=name, gate=failure.gate, what=failure.metric or "finite", regression=failure.text)
    if certificates.unlike(after, before) is None and (found := new.certificate) is not None:
        wrong = found.status == "contradicted" and held.certified is not False and _certified(after)
        text = f"weights must be those of the baseline, rounded: {found.reason}"
        yield Change(stage=name, gate="certificate", what="weights", after=found.weights, note=found.reason, regression=text if wrong else None)
    if after.answers is not None and new.answers is not None:
        try:
            replay.check(new.answers, after.answers, after.precision, f"'{directory}'")
        except WrongAnswer as error:
            yield Change(stage=name, gate="parity", what="recorded outputs", regression=str(error))


def _rounded_alike(before: Manifest, after: Manifest, new: StageMeasurements, held: Limits) -> list[Failure]:
    """Return the failures of parity that both precisions together do not explain."""
    own = [gates.effective_limits(manifest.precision).cosine_median_min for manifest in (before, after)]
    # Errors of two roundings add in their squares, as which cosines fall.
    both = 1 - sum(1 - limit for limit in own if limit is not None)
    least = None if held.cosine_median_min is None else min(held.cosine_median_min, both)
    held = held.model_copy(update={"cosine_median_min": least})
    found = [*parity.failures(new.cases, held), *padding_patterns.failures(new.cases, held)]
    return [failure for failure in found if failure.metric is not None and failure.metric not in _SHOWN]


def _certified(after: Manifest) -> bool:
    """Return whether the artefact's own recipe lets weights contradict no certificate."""
    passed = after.passed_limits()
    return passed is None or passed.certified is not False


def not_compared(before: Manifest, after: Manifest, new: StageMeasurements, beside_checkpoint: Certificate | None, checked: bool) -> list[str]:
    """Return what the two artefacts did not show of a model in reduced precision, each with the reason.

    `checked`: `after` was also compared with its checkpoint, which gave the certificate `beside_checkpoint`.
    """
    one = of_one_checkpoint(before, after)
    if not one and not checked:
        missing = "a manifest does not name its checkpoint" if None in (before.checkpoint_sha256, after.checkpoint_sha256) else "they are of two checkpoints"
        return [f"the candidate with its own checkpoint: {missing}, so that weights and errors of rounding are unknown"]
    coarser = after.precision if checked else max(before.precision, after.precision, key=_PRECISIONS.index)
    if coarser == "float32":
        return []
    found = []
    why = certificates.unlike(after, before)
    known = [beside_checkpoint, new.certificate if why is None else None]
    # In torch every tensor was compared, though other modules run.
    whole = after.form in ("eager", "compiled") and beside_checkpoint is not None and beside_checkpoint.weights > 0
    if not whole and not any(certificate is not None and certificate.status != "none" for certificate in known):
        said = next((certificate.reason for certificate in known if certificate is not None), why)
        found.append(f"weights: {'with the checkpoint only rows of tables: ' if checked else ''}{said or 'they cannot be read'}")
    if not checked:
        found.append(f"errors with those that {coarser} explains: simulating it takes the checkpoint, which a baseline of form '{before.form}' does not hold")
    return found
