"""`bertopt.load`: what it refuses before a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.errors import UsageError


@pytest.mark.parametrize("name", ["threads", "streams"])
@pytest.mark.parametrize("value", [0, -1, "2", 1.5, True, 10**6])
def test_threads_and_streams_are_counts(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} must be a whole number from 1 to 1024; got"):
        bertopt.load(tmp_path, **{name: value})


def test_streams_share_the_threads(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="99 streams for 1 threads"):
        bertopt.load(tmp_path, threads=1, streams=99)


@pytest.mark.parametrize("device", ["gpu", "CPU", 0])
def test_the_device_is_one_of_two(device: Any, tmp_path: Path) -> None:
    """A runtime's own error read as a damaged artefact."""
    with pytest.raises(UsageError, match="device must be one of cpu, cuda, or None"):
        bertopt.load(tmp_path, device=device)


@pytest.mark.parametrize("value", [0, "8", 1.5, True])
def test_tokens_of_a_batch_are_a_count(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_batch_tokens must be a whole number from 1; got"):
        bertopt.load(tmp_path, max_batch_tokens=value)
