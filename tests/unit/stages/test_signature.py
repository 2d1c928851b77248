"""Signatures: whose artefact it is."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest

import bertopt
from bertopt import stages
from bertopt.cli import main
from bertopt.errors import IntegrityError, UsageError
from bertopt.stages import signature
from tests.support.artefacts import write_placeholder
from tests.support.specs import spec

pytest.importorskip("cryptography")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_placeholder(tmp_path / "artifact", spec())


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return signature.new_key(tmp_path / "release.key")


def test_a_signed_artefact_verifies_with_its_key_and_without(artifact: Path, key: Path) -> None:
    before = stages.verify(artifact).content_sha256
    stages.sign(artifact, key)
    assert stages.verify(artifact, Path(f"{key}.pub")).content_sha256 == before
    assert stages.verify(artifact).content_sha256 == before


def test_no_half_of_a_key_is_made(tmp_path: Path) -> None:
    """A private key was left behind beside the public one of another, which shows nothing that it signs."""
    (tmp_path / "a.key.pub").write_bytes(b"another's")
    with pytest.raises(UsageError, match=r"a\.key\.pub' exists and is not overwritten"):
        signature.new_key(tmp_path / "a.key")
    assert [path.name for path in tmp_path.iterdir()] == ["a.key.pub"]


def test_a_wrong_key_is_refused(artifact: Path, key: Path, tmp_path: Path) -> None:
    stages.sign(artifact, key)
    other = signature.new_key(tmp_path / "other.key")
    with pytest.raises(IntegrityError, match="was not signed with the key"):
        stages.verify(artifact, Path(f"{other}.pub"))


def test_an_unsigned_artefact_is_refused_where_a_key_is_given(artifact: Path, key: Path) -> None:
    with pytest.raises(IntegrityError, match=r"is not signed: it has no manifest\.json\.sig"):
        stages.verify(artifact, Path(f"{key}.pub"))


def test_whoever_writes_a_new_manifest_needs_the_key(artifact: Path, key: Path) -> None:
    stages.sign(artifact, key)
    kept = (artifact / signature.SIGNATURE).read_bytes()
    (artifact / "onnx" / "model.onnx").write_bytes(b"other")
    stages.write_manifest(artifact, stages.read_manifest(artifact).model_dump(mode="json", exclude={"files"}))
    stages.verify(artifact)
    assert not (artifact / signature.SIGNATURE).exists()  # a manifest written anew is not signed
    (artifact / signature.SIGNATURE).write_bytes(kept)
    with pytest.raises(IntegrityError, match="was not signed with the key"):
        stages.verify(artifact, Path(f"{key}.pub"))


@pytest.mark.parametrize("content", [b"", b"x" * 63, b"x" * 65, b"\0" * 64])
def test_a_damaged_signature_is_refused(artifact: Path, key: Path, content: bytes) -> None:
    (artifact / signature.SIGNATURE).write_bytes(content)
    with pytest.raises(IntegrityError, match="was not signed with the key"):
        stages.verify(artifact, Path(f"{key}.pub"))


def test_a_signature_elsewhere_is_a_foreign_file(artifact: Path) -> None:
    (artifact / "onnx" / signature.SIGNATURE).write_bytes(b"x")
    with pytest.raises(IntegrityError, match="not listed"):
        stages.verify(artifact)


def test_a_damaged_artefact_is_not_signed(artifact: Path, key: Path) -> None:
    (artifact / "onnx" / "model.onnx").write_bytes(b"other")
    with pytest.raises(IntegrityError, match="is not the file that was exported"):
        stages.sign(artifact, key)
    assert not (artifact / signature.SIGNATURE).exists()


def test_a_stage_does_not_hand_its_signature_down(artifact: Path, key: Path, tmp_path: Path) -> None:
    stages.sign(artifact, key)
    stages.inherit(artifact, tmp_path / "child")
    assert not (tmp_path / "child" / signature.SIGNATURE).exists()


@pytest.mark.parametrize("content", [None, "", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_file_that_is_no_key_is_named(artifact: Path, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "no.key"
    if content is not None:
        path.write_text(content)
    for use in (stages.sign, stages.verify):
        with pytest.raises(UsageError, match=r"no\.key"):
            use(artifact, path)


def test_the_two_halves_are_not_confused(artifact: Path, key: Path) -> None:
    with pytest.raises(UsageError, match="private"):
        stages.sign(artifact, Path(f"{key}.pub"))
    stages.sign(artifact, key)
    with pytest.raises(UsageError, match="public"):
        stages.verify(artifact, key)


def test_a_key_is_not_overwritten_and_is_readable_by_its_owner_alone(key: Path) -> None:
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="exists"):
        signature.new_key(key)


def test_load_checks_the_signature_first(artifact: Path, key: Path) -> None:
    with pytest.raises(IntegrityError, match="is not signed"):
        bertopt.load(artifact, key=Path(f"{key}.pub"))


def test_openssl_can_check_it_too(artifact: Path, key: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    stages.sign(artifact, key)
    command = [
        "openssl", "pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", f"{key}.pub", "-sigfile",
        str(artifact / signature.SIGNATURE), "-in", str(artifact / stages.MANIFEST),
    ]  # fmt: skip
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_the_command_line(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "mine.key"

    def run(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    assert run("sign", str(artifact), "--key", str(key))[0] == 2
    code, said = run("sign", str(artifact), "--key", str(key), "--new-key")
    assert code == 0
    assert f"{key}.pub" in said
    other = signature.new_key(tmp_path / "other.key")
    code, said = run("verify", str(artifact), "--key", f"{other}.pub")
    assert code == 6
    assert "was not signed with the key" in said.splitlines()[-1]


def test_verify_refuses_what_was_replaced_after_its_signature_was_checked(artifact: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker opens the files again, without the key: it must open those that were signed."""
    from bertopt.commands import verify

    stages.sign(artifact, key)

    def replaced(_: object, directory: Path, manifest: stages.Manifest) -> dict[str, str]:
        (artifact / "onnx" / "model.onnx").write_bytes(b"other")
        stages.write_manifest(artifact, stages.read_manifest(artifact).model_dump(mode="json", exclude={"files"}))
        return {}

    monkeypatch.setattr(verify, "_smoke", replaced)
    monkeypatch.setattr(verify, "_differences", lambda _: [])
    monkeypatch.setattr(verify, "Workers", contextlib.nullcontext)
    with pytest.raises(IntegrityError, match="was changed while"):
        verify.verify(artifact, key=Path(f"{key}.pub"))


def test_verify_gives_workers_a_private_copy_of_what_others_may_write(artifact: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bertopt.commands import verify

    stages.sign(artifact, key)
    artifact.chmod(0o777)
    opened = []
    monkeypatch.setattr(verify, "_smoke", lambda _, directory, __: opened.append(directory) or {})
    monkeypatch.setattr(verify, "_differences", lambda _: [])
    monkeypatch.setattr(verify, "Workers", contextlib.nullcontext)
    report = verify.verify(artifact, key=Path(f"{key}.pub"))
    assert opened[0] != artifact and not opened[0].exists() and report.model["source"] == str(artifact)
