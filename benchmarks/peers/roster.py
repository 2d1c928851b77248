"""Who races: peers with their environments, and this project's artefacts."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import environments
from benchmarks.peers.models import Checkpoint

ROOT = Path(__file__).parent.parent.parent
#: CPU features of which one is needed for bfloat16 products.
BF16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Entry:
    """One contender: `load` is the server's `module:function`, `made` what `build.py` makes for it."""

    name: str
    environment: str | None
    load: str
    options: dict[str, Any] = field(default_factory=dict)
    made: str | None = None
    peer: bool = True
    needs: tuple[str, ...] = ()
    labelled: bool = False
    directory: Path | None = None


def _sentence(name: str, backend: str, file: str = "", **more: Any) -> Entry:
    environment, made = (backend, backend) if file else ("torch", None)
    options = {"backend": backend, **({"file_name": file} if file else {}), **more.pop("options", {})}
    return Entry(name, environment, "loaders:sentence_transformers", options, made, **more)


#: What is compared with: the names are the report's.
REFERENCE = "sentence-transformers torch fp32"
ONNX, ONNX_INT8 = "onnx/model.onnx", "onnx/model_qint8_avx512_vnni.onnx"
OPENVINO_INT8 = "openvino/openvino_model_qint8_quantized.xml"
PEERS = (
    _sentence(REFERENCE, "torch", options={"dtype": "float32"}),
    _sentence("sentence-transformers torch bf16", "torch", options={"dtype": "bfloat16"}, needs=BF16),
    _sentence("sentence-transformers ONNX", "onnx", ONNX),
    _sentence("sentence-transformers ONNX qint8", "onnx", ONNX_INT8),
    _sentence("sentence-transformers OpenVINO", "openvino", "openvino/openvino_model.xml"),
    _sentence("sentence-transformers OpenVINO qint8", "openvino", OPENVINO_INT8),
    Entry("onnxruntime", "onnx", "loaders:plain_onnxruntime", {"file_name": ONNX}, "onnx"),
    Entry("onnxruntime qint8", "onnx", "loaders:plain_onnxruntime", {"file_name": ONNX_INT8}, "onnx"),
    Entry("openvino qint8", "openvino", "loaders:plain_openvino", {"file_name": OPENVINO_INT8, "in_flight": 1}, "openvino"),
    Entry("openvino qint8, 2 streams", "openvino", "loaders:plain_openvino", {"file_name": OPENVINO_INT8, "in_flight": 2}, "openvino"),
    Entry("optimum ONNX", "onnx", "loaders:optimum", {"file_name": ONNX}, "onnx"),
    Entry("transformers torch fp32", "torch", "loaders:classifier", labelled=True),
)


def reference(labelled: bool) -> Entry:
    name = "transformers torch fp32" if labelled else REFERENCE
    return next(entry for entry in PEERS if entry.name == name)


def ours(name: str, directory: Path, labelled: bool) -> Entry:
    """An artefact. Raises FileNotFoundError where there is none."""
    if not (directory / "manifest.json").is_file():
        raise FileNotFoundError(f"'{directory}' is no artefact: it has no manifest.json; export one first")
    return Entry(name, None, "ours:load", peer=False, labelled=labelled, directory=directory.resolve())


def wanted(checkpoint: Checkpoint, artefacts: Sequence[Entry], only: Sequence[str]) -> list[Entry]:
    """Peers for this kind of checkpoint and artefacts. Raises ValueError for a name in `only` that is none."""
    entries = [entry for entry in PEERS if entry.labelled == checkpoint.labelled] + list(artefacts)
    known = [entry.name for entry in (*PEERS, *artefacts)]
    for name in only:
        if name not in known:
            raise ValueError(f"--only must name contenders of {known}; got '{name}'")
    return [entry for entry in entries if not only or entry.name in only]


@dataclass(frozen=True)
class Ready:
    """A contender that can be started; `identity` changes when what it runs does."""

    entry: Entry
    python: Path
    path: tuple[Path, ...]
    options: dict[str, Any]
    identity: str


def ready(
    entry: Entry, checkpoint: Checkpoint, source: Path, folder: Path, texts: Path, options: dict[str, Any]
) -> Ready:
    """Build environment and model where they are missing. `texts` has a train.jsonl. Raises BuildError."""
    if entry.directory is not None:
        manifest = (entry.directory / "manifest.json").read_bytes()
        return Ready(
            entry, Path(sys.executable), (ROOT,), {**options, "load": entry.load, "directory": str(entry.directory)},
            hashlib.sha256(manifest).hexdigest()[:16],
        )  # fmt: skip
    assert entry.environment is not None
    python, directory = environments.environment(entry.environment, folder), source
    if entry.made:
        # Calibration of the large random model is kept short: its figures are about speed.
        samples = 16 if checkpoint.work > 1 else 0
        directory = environments.built(
            entry.made,
            python,
            source,
            folder / "models" / (checkpoint.same_as or checkpoint.name) / entry.made,
            texts,
            samples,
        )
    found = {**options, **entry.options, "load": entry.load, "directory": str(directory)}
    mark = (directory if entry.made else folder / entry.environment) / "made-from"
    return Ready(entry, python, (), found, hashlib.sha256(mark.read_bytes()).hexdigest()[:16])


def calibration(train: Path, folder: Path) -> Path:
    """A folder with the texts peers calibrate on, in the form their loaders take."""
    out = folder / "models" / "calibration"
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(train, out / "train.jsonl")
    return out
