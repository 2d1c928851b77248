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
