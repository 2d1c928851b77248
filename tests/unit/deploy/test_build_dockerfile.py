"""The image that builds artefacts: the command in its head writes to a directory of the host's user."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[3] / "deploy" / "docker" / "Dockerfile.build"


def test_what_it_builds_lands_in_a_directory_of_the_caller() -> None:
    """The image's user may not write to a mounted directory; the caller's has no home and no name in the image."""
    head, _, steps = FILE.read_text("utf-8").partition("FROM ")
    command = next(line for line in head.splitlines() if "docker run" in line)
    assert "mkdir -p out" in head and '--user "$(id -u):$(id -g)"' in command and '-v "$PWD/out:/work/out"' in command
    assert "ENV HOME=/tmp USER=bertopt" in steps
