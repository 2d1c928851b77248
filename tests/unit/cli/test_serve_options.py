"""What the options of `bertopt serve` mean."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from bertopt.cli import app
from bertopt.serve.settings import Settings


def test_sizes_are_in_megabytes_of_a_million_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(models: Any, settings: Settings, log_level: str) -> None:
        seen.append(settings)

    monkeypatch.setattr("bertopt.serve.server.serve", serve)
    for options in ((), ("--request-mb", "1", "--cache-mb", "2.5")):
        assert CliRunner().invoke(app, ["serve", "NAME=out/artifact", *options]).exit_code == 0
    assert [(each.request_bytes, each.cache_bytes) for each in seen] == [(4_000_000, 0), (1_000_000, 2_500_000)]
