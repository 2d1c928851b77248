"""A package that torch compiled ahead of time: served without compiler and transformers, and only where it fits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt import stages
from bertopt.core import Context, Eager, Packaged
from bertopt.errors import IntegrityError, Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import (
    CaptureGraphs,
    CastHalf,
    MergeQkv,
    PackageAot,
    PackSequences,
    UseBetterTransformer,
    UseSdpa,
    package_aot,
)
from bertopt.runtime.load import load
from bertopt.sessions import open_session
from bertopt.sessions.package import PackageSession, misfit
from tests.support.built import apply_passes
from tests.support.tiny_models import Tiny

#: Of files, damaged one after the other.
CHANGES = 60
TEXTS = ["a cat sat on the mat", "", "not very good ! " * 6]


@pytest.fixture(scope="module")
def source(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Eager:
    model = checkpoint.load(tiny("bert", "feature-extraction", "mean"))
    return apply_passes(model, UseSdpa(), CastHalf(), tmp_path=tmp_path_factory.mktemp("eager"))


@pytest.fixture(scope="module")
def stage(source: Eager, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed stage; compiling takes about twenty seconds."""
    parent, out = tmp_path_factory.mktemp("parent"), tmp_path_factory.mktemp("package")
    checkpoint.write_snapshot(source, parent)
    result = PackageAot()(source, Context(workdir=out))
    assert result.changes == {"libraries": 1}
    stages.inherit(parent, out)
    stages.write_form(result.model, out)
    stages.write_manifest(out, stages.describe(result.model))
    return out


def test_it_answers_as_the_network_it_was_made_of_in_any_shape(source: Eager, stage: Path) -> None:
    model = stages.open_stage(stage)
    assert isinstance(model, Packaged) and model.precision == "bfloat16"
    package, eager = open_session(model), open_session(source)
    for rows, length in ((1, 1), (1, 7), (5, 1), (3, 40)):
        ids = np.random.default_rng(rows).integers(5, 40, (rows, length))
        mask = (np.arange(length) < np.arange(1, rows + 1)[:, None] * length // rows).astype(np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        got, wanted = package.run(inputs), eager.run(inputs)
        np.testing.assert_allclose(got["sentence_embedding"], wanted["sentence_embedding"], atol=3e-2)
    shown = PackageAot().effects(model, package.facts())
    assert all(expected == found for expected, found in shown.values())


def test_a_fresh_process_needs_no_compiler_and_no_transformers(source: Eager, stage: Path) -> None:
    program = (
        "import json, sys, bertopt\n"
        f"vectors = bertopt.load({str(stage)!r})({TEXTS!r})\n"
        "assert not {'transformers', 'optimum'} & {*sys.modules}, 'imported'\n"  # torch's builds for CUDA import triton themselves
        "print(json.dumps(vectors.tolist()))"
    )
    clean = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False,
        env={**clean, "PATH": "", "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "outdated" not in done.stderr  # what torch says where it finds no compiler
    wanted = load(stage)(TEXTS)
    np.testing.assert_allclose(json.loads(done.stdout), wanted, atol=1e-6)


def test_it_is_opened_only_where_it_fits(stage: Path) -> None:
    model = stages.open_stage(stage)
    assert isinstance(model, Packaged)
    wrong = {
        "needs torch 2.9.1": {"torch": "2.9.1"}, "is for s390x": {"machine": "s390x"},
        "avx1024, which this CPU lacks": {"instructions": ("avx1024",)}, "is for device: cuda": {"device": "cuda"},
    }  # fmt: skip
    for reason, fields in wrong.items():
        foreign = replace(model, built=model.built.model_copy(update=fields))
        with pytest.raises(Unsupported, match=f"{reason}.*bertopt export RECIPE"):
            open_session(foreign)


def test_it_is_opened_only_on_its_gpu(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stages.open_stage(stage)
    assert isinstance(model, Packaged)
    built = replace(model, built=model.built.model_copy(update={"device": "cuda", "capability": "sm90"}))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert misfit(built, "cuda") == "the package is for sm90; this GPU is sm89"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert misfit(built, "cuda") is None


def test_on_a_gpu_the_package_does_not_wait_for_the_batch_before(stage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its locks, a container of one runner makes the host wait for the batch in flight, Python's lock held, before it queues the next."""
    model = stages.open_stage(stage)
    assert isinstance(model, Packaged)
    built = replace(model, built=model.built.model_copy(update={"device": "cuda", "capability": "sm90"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    asked: list[bool] = []
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, run_single_threaded: asked.append(run_single_threaded))
    queue: Any = object()
    session = PackageSession(built, "cuda", queue=queue)
    assert asked == [True] and session.concurrent  # the session gives its threads turns
    PackageSession(model, "cpu")
    assert asked == [True, False]


def test_a_changed_file_reaches_no_loader(stage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file in turn, the manifest included: bits flipped and ends cut off. A run of 500 changes refused all of them."""
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda *_, **__: pytest.fail("opened"))
    shutil.copytree(stage, tmp_path, dirs_exist_ok=True)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {tmp_path / "package/model.pt2", tmp_path / stages.MANIFEST, tmp_path / "tokenizer.json"} < {*files}
    rng = np.random.default_rng(0)
    for number in range(CHANGES):
        path = files[number % len(files)]
        content = path.read_bytes()
        broken = bytearray(content)
        if number // len(files) % 4 == 3:
            del broken[rng.integers(len(broken)) :]
        else:
            broken[rng.integers(len(broken))] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        with pytest.raises(IntegrityError):
            load(tmp_path)
        path.write_bytes(content)


def test_what_cannot_be_packaged_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    varlen = PackSequences(attention="varlen")
    assert "masked" in (PackageAot().device_conflict("cpu", [varlen]) or "")
    assert PackageAot().device_conflict("cuda", [varlen]) is None
    assert PackageAot().conflict([UseBetterTransformer()]) and PackageAot().conflict([varlen, CaptureGraphs()])
    packed = varlen(checkpoint.load(tiny()), Context(workdir=tmp_path)).model
    with pytest.raises(Unsupported, match="attention: masked"):
        PackageAot()(packed, Context(workdir=tmp_path))


def test_one_graph_serves_unpadded_rows_of_every_size(tiny: Tiny, tmp_path: Path) -> None:
    """On `meta`, where a size that the graph were bound to, or a value asked of the device, would end the export."""
    model = apply_passes(checkpoint.load(tiny()), MergeQkv(), CastHalf(), PackSequences(attention="varlen"), tmp_path=tmp_path)
    network = model.network.to("meta")
    sizes = {name: 4 if name == "first_tokens" else 32 for name in network.inputs}
    inputs = tuple(torch.zeros(1, size, dtype=torch.int64, device="meta") for size in sizes.values())
    with torch.no_grad():
        program = torch.export.export(network, inputs, dynamic_shapes={"tensors": package_aot._dynamic(model)})
    assert sum("_flash_attention_forward" in str(node.target) for node in program.graph.nodes) == 2
