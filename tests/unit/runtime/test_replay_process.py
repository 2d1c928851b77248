"""Which of the files that a new interpreter opens are neither the artefact's nor every machine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertopt.runtime import replay_process


def test_data_is_named_and_descriptions_of_packages_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_process.tempfile, "gettempdir", lambda: "/nowhere")
    artefact, checkout = tmp_path / "artifact", tmp_path / "checkout"
    described = [checkout / "bertopt.egg-info" / "entry_points.txt", checkout / "bertopt-1.dist-info" / "METADATA"]
    data, own = checkout / "scale.txt", artefact / "config.json"
    for path in [*described, data, own]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    opened = {str(path) for path in [*described, data, own]}
    assert replay_process._elsewhere(opened, artefact) == [str(data)]
