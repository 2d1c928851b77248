"""Sessions start no more threads than the CPU quota of a container leaves time for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bertopt
from bertopt.system import limits
from tests.support.artefacts import Form, write_artefact
from tests.support.tiny_models import Tiny

NEEDS = {"onnx": "onnxruntime", "openvino": "openvino", "native": "bertopt_native"}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def threads(artefact: Path, given: int | None = None) -> object:
    return bertopt.load(artefact, threads=given).session.facts().threads


@pytest.mark.parametrize("form", ["eager", "onnx", "openvino", "native"])
def test_threads_fit_the_quota(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form) -> None:
    if form in NEEDS:
        pytest.importorskip(NEEDS[form])
    if form == "native" and not importlib.import_module("bertopt_native").supported():
        pytest.skip("this CPU has no AVX2")
    artefact = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "artefact", form)
    monkeypatch.setattr(limits, "visible_cores", lambda: 8)

    monkeypatch.setattr(limits, "cgroup_cpus", lambda: 0.5)
    assert threads(artefact) == 1
    assert threads(artefact, 2) == min(2, len(os.sched_getaffinity(0)) if form == "openvino" else 2), "what is given holds"


@pytest.mark.parametrize(("quota", "cores", "few"), [(None, 8, None), (8.0, 8, None), (7.5, 8, None), (2.5, 3, 3), (0.25, 1, 1), (64.0, 8, None)])
def test_cores_within_a_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int, few: int | None) -> None:
    monkeypatch.setattr(limits, "visible_cores", lambda: 8)
    monkeypatch.setattr(limits, "cgroup_cpus", lambda: quota)
    assert (limits.cores(), limits.quota_threads()) == (cores, few)


def test_cores_are_counted_where_the_affinity_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: int) -> set[int]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", denied)
    assert limits.visible_cores() == os.cpu_count()


def test_torch_keeps_fewer_threads(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artefact = write_artefact(tiny(), tmp_path / "artefact", "eager")
    monkeypatch.setattr(limits, "visible_cores", lambda: 8)
    monkeypatch.setattr(limits, "cgroup_cpus", lambda: 3.0)
    assert threads(artefact) == 3
    torch.set_num_threads(1)
    assert threads(artefact) == 1
