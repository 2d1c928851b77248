"""Models of the hub, from one that is on this machine: what is fetched, what is remembered of it, and what is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

import bertopt
from bertopt import stages
from bertopt.commands.push import push
from bertopt.commands.verify import verify
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import source
from tests.support.artefacts import write_artefact
from tests.support.command_line import call, last_line, write_recipe
from tests.support.fake_hub import FakeHub
from tests.support.serving import InProcess
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify") as shared:
        yield shared


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub(monkeypatch, tmp_path / "cache") as one:
        yield one


def published(directory: Path, tmp_path: Path) -> Path:
    """The files of a checkpoint as a repository of the hub has them, among others."""
    found = shutil.copytree(directory, tmp_path / "published")
    for name in ("README.md", "pytorch_model.bin", "onnx/model.onnx", "modeling_custom.py"):
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_bytes(b"not to be fetched")
    return found


def test_a_model_of_the_hub_is_optimised_remembered_and_verified_by_its_commit(hub: FakeHub, tiny: Tiny, tmp_path: Path) -> None:
    first = hub.commit("org/name", published(tiny(), tmp_path))
    recipe, out = write_recipe(tmp_path, Path("org/name")), tmp_path / "out"
    assert call("export", str(recipe), "--out", str(out)).exit_code == 0
    assert set(hub.fetched) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert len(hub.fetched) == 4, "no file is fetched twice"
    report, manifest = json.loads((out / "report.json").read_text()), stages.read_manifest(out / "artifact")
    assert report["model"]["commit"] == first == manifest.checkpoint_commit
    assert report["model"]["sha256"] == manifest.checkpoint_sha256
    server = InProcess({"m": out / "artifact"})
    assert server.get("/info").json()["model_sha"] == first
    server.close()
    assert f"- commit of the checkpoint: {first}" in (out / "artifact" / "README.md").read_text()

    hub.commit("org/name", tiny(seed=1))
    again = verify(out / "artifact", "org/name")
    assert again.exit_code == 0, again.reason
    hub.commit("org/other", tiny(seed=1))
    other = verify(out / "artifact", "org/other")
    assert other.exit_code == 3
    assert any("the checkpoint's files differ from those that the artefact was made of" in text for text in other.model["warnings"])


def test_of_a_model_that_is_no_encoder_only_the_configuration_is_fetched(hub: FakeHub, tiny: Tiny, tmp_path: Path) -> None:
    directory = published(tiny(), tmp_path)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "model_type": "llama"}))
    hub.commit("org/decoder", directory)
    found = call("export", str(write_recipe(tmp_path, Path("org/decoder"))), "--out", str(tmp_path / "out"))
    assert found.exit_code == 2 and "llama" in last_line(found)
    assert hub.fetched == ["config.json"]


def test_what_the_hub_does_not_have_is_named(hub: FakeHub, tiny: Tiny) -> None:
    hub.commit("org/name", tiny())
    with pytest.raises(UsageError, match="the hub has no such model"):
        source.resolve("org/nothing")
    with pytest.raises(UsageError, match="has no revision 'v9' on the hub"):
        source.resolve("org/name", "v9")


def test_a_hub_that_answers_late_is_waited_for_as_long_as_the_user_says(hub: FakeHub, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("org/name", tiny())
    monkeypatch.setattr(source, "HUB_TIMEOUT_S", 0.2)
    hub.delay_s = 0.5
    with pytest.raises(UsageError, match=r"Timeout: .*; check the name and the network, set HF_HUB_ETAG_TIMEOUT \(now 0\.2 s\), or download"):
        source.resolve("org/name")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "30")
    assert (source.resolve("org/name") / "model.safetensors").is_file()


def test_an_artefact_is_written_to_the_hub_file_by_file(hub: FakeHub, exported: tuple[Path, Result]) -> None:
    artifact = exported[0] / "artifact"
    assert push(artifact, "org/name") == f"{hub.url}/org/name/commit/1"
    assert hub.written == {str(path.relative_to(artifact)): path.read_bytes() for path in artifact.rglob("*") if path.is_file()}


def test_an_artefact_is_fetched_from_the_hub_as_its_card_says(hub: FakeHub, tiny: Tiny, tmp_path: Path) -> None:
    """The hub adds a file to each repository, its client a folder to what it fetches, or links: `load` takes only what was exported."""
    from huggingface_hub import snapshot_download

    published = write_artefact(tiny(), tmp_path / "published", "eager")
    (published / ".gitattributes").write_text("*.bin filter=lfs")
    hub.commit("org/name", published)
    with pytest.raises(IntegrityError, match=r"is a link; copy the files themselves, as `cp -rL` does"):
        bertopt.load(snapshot_download("org/name"))
    fetched = Path(snapshot_download("org/name", local_dir=tmp_path / "fetched"))
    with pytest.raises(IntegrityError, match=r"'\.cache', '\.gitattributes' in .* are not listed in manifest\.json; remove them"):
        bertopt.load(fetched)
    shutil.rmtree(fetched / ".cache")
    (fetched / ".gitattributes").unlink()
    assert len(bertopt.load(fetched)(["the cat", "a dog"])) == 2
