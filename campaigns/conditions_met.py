"""`python -m campaigns.conditions_met [--seeds N]`: which conditions of the mutants' tables the sweeps meet, by seed; no model is run.

A model that is wrong under a condition is seen where a batch meets it, and the seed of a checkpoint draws the batches. Real texts and timed
inputs are left out: in reduced precision a single text may differ by much.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bertopt.checks import padding_patterns, probes, sweep_plan
from bertopt.checks.probes import Probe
from bertopt.core import ShapeLimits, Spec
from bertopt.runtime.batch_limits import MAX_BATCH, most_tokens
from campaigns.mutants import checkpoints
from campaigns.mutants.harness import SHAPES
from tests.support.tiny_models import VOCABULARY

TABLES = ("conditions", "as_read", "batch_forms", "unseen_calls", "shipped_bugs", "service_batches", "batch_lengths")


def spec_of_a_tiny_classifier() -> Spec:
    from bertopt.modeling import checkpoint

    with tempfile.TemporaryDirectory() as folder:
        return checkpoint.open_directory(checkpoints.write(Path(folder) / "model")).spec


def met(condition: Callable[[dict[str, Any]], Any], of: list[Probe]) -> bool:
    """Whether a batch of `of` has a row that meets the condition."""
    import torch

    named = ({name: torch.from_numpy(array) for name, array in probe.inputs.items()} for probe in of)
    return any(bool(torch.as_tensor(condition(inputs)).any()) for inputs in named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    count: int = parser.parse_args().seeds
    spec = spec_of_a_tiny_classifier()
    frame = (VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]"))
    tokens, whole = most_tokens(spec, launched=False), ShapeLimits(longest=spec.max_length)
    swept = [sweep_plan.plan(spec, seed, tokens, frame).of(True, whole) for seed in range(count)]
    shapes = [(batch, sequence) for batch, sequence in SHAPES]
    probed = [*probes.grid(spec, shapes, None), *probes.serving(spec, MAX_BATCH), *padding_patterns.probes(spec, MAX_BATCH)]
    print(f"{'condition':32} {'seeds':>7}  probes")
    for table in TABLES:
        for name, (_, condition) in import_module(f"campaigns.mutants.{table}").CONDITIONS.items():
            seeds = sum(met(condition, of) for of in swept)
            print(f"{name:32} {seeds:3}/{count:<3}  {'met' if met(condition, probed) else '-'}", flush=True)


if __name__ == "__main__":
    main()
