"""`--key`: every command that opens an artefact takes one, and opens none that is not signed with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.commands import compare, profile
from bertopt.errors import UsageError
from bertopt.stages import signature
from tests.support.artefacts import write_artefact
from tests.support.command_line import call
from tests.support.tiny_models import Tiny

pytest.importorskip("cryptography")
COMMANDS = {
    "verify": ["verify", "{}"], "bench": ["bench", "{}"], "compare": ["compare", "{}", "{}-2"], "profile": ["profile", "{}"],
    "serve": ["serve", "{}", "--port", "0"], "bulk": ["bulk", "{}.jsonl", "{}-out", "--artifact", "{}"], "triton": ["deploy", "triton", "{}", "{}-out"],
}  # fmt: skip


@pytest.fixture
def artefact(tiny: Tiny, tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("a", "a-2"):
        write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / name, "eager")
    return tmp_path / "a"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_artefact_without_the_signature_is_not_opened(name: str, artefact: Path, tmp_path: Path) -> None:
    key = Path(f"{signature.new_key(tmp_path / 'release.key')}.pub")
    found = call(*(part.format(artefact) for part in COMMANDS[name]), "--key", str(key))
    assert found.exit_code == 6 and "is not signed" in found.stderr
    assert not (tmp_path / "a-out").exists()


@pytest.mark.parametrize("name", ["compare", "profile", "triton"])
def test_an_artefact_with_the_signature_is(name: str, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: Any, **__: Any) -> Any:
        raise UsageError("opened")

    monkeypatch.setattr(compare, "Workers", opened)
    monkeypatch.setattr(profile, "Workers", opened)
    key = signature.new_key(tmp_path / "release.key")
    for one in (artefact, tmp_path / "a-2"):
        stages.sign(one, key)
    found = call(*(part.format(artefact) for part in COMMANDS[name]), "--key", f"{key}.pub")
    if name == "triton":
        assert found.exit_code == 0
        stages.verify(tmp_path / "a-out" / "a" / "1" / "artifact", Path(f"{key}.pub"))
    else:
        assert (found.exit_code, found.stderr.splitlines()[-1]) == (2, "opened")


def test_reports_are_not_signed(tmp_path: Path) -> None:
    (tmp_path / "k.pub").write_text("")
    found = call("compare", str(tmp_path), str(tmp_path), "--key", str(tmp_path / "k.pub"))
    assert found.exit_code == 2 and "--key goes with two artefacts; reports are not signed" in found.stderr
