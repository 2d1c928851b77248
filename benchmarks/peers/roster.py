"""Who races: peers with their environments, and this project's artefacts."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers import environments
from benchmarks.peers.models import Checkpoint, Kind
from bertopt.errors import BertoptError

ROOT = Path(__file__).parent.parent.parent
#: CPU features of which one is needed for bfloat16 products.
BF16 = ("avx512_bf16", "amx_bf16", "bf16")
#: The same for torch's INT8 products on x86, which saturate without them.
VNNI = ("avx_vnni", "avx512_vnni", "amx_int8")


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
    kind: Kind = "embedder"
    directory: Path | None = None


def _sentence(name: str, backend: str, file: str = "", **more: Any) -> Entry:
    environment, made = (backend, backend) if file else ("torch", None)
    loader = "sparse_encoder" if more.get("kind") == "sparse" else "sentence_transformers"
    options = {"backend": backend, **({"file_name": file} if file else {}), **more.pop("options", {})}
    return Entry(name, environment, f"loaders:{loader}", options, made, **more)


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
    Entry("ctranslate2 int8", "torch", "loaders:ctranslate2", {}, "ctranslate2"),
    Entry("inductor bf16", "torch", "loaders:inductor", needs=BF16),
    Entry("inductor int8", "torch", "loaders:inductor_int8", {}, "inductor", needs=VNNI),
    Entry("llama.cpp q8_0", "llama", "loaders:llama", {}, "llama"),
    Entry("optimum ONNX", "onnx", "loaders:optimum", {"file_name": ONNX}, "onnx"),
    Entry("transformers torch fp32", "torch", "loaders:classifier", kind="classifier"),
    _sentence("SparseEncoder torch fp32", "torch", options={"dtype": "float32"}, kind="sparse"),
    _sentence("SparseEncoder torch bf16", "torch", options={"dtype": "bfloat16"}, needs=BF16, kind="sparse"),
    _sentence("SparseEncoder ONNX qint8", "onnx", ONNX_INT8, kind="sparse"),
    _sentence("SparseEncoder OpenVINO", "openvino", "openvino/openvino_model.xml", kind="sparse"),
    _sentence("SparseEncoder OpenVINO qint8", "openvino", OPENVINO_INT8, kind="sparse"),
)
#: Whose answers are right, by what a model answers.
REFERENCES: dict[Kind, str] = {"embedder": REFERENCE, "classifier": "transformers torch fp32", "sparse": "SparseEncoder torch fp32"}


#: Who races without `--all`: the fastest of each library in INT8, and of models that are not large the others here too.
FASTEST = {
    "sentence-transformers OpenVINO qint8", "openvino qint8", "openvino qint8, 2 streams", "onnxruntime qint8", "ctranslate2 int8",
}  # fmt: skip
OTHERS = {
    REFERENCE, "transformers torch fp32", "sentence-transformers OpenVINO", "sentence-transformers torch bf16", "onnxruntime",
    "inductor bf16", "inductor int8", "llama.cpp q8_0",
}  # fmt: skip
#: Of sparse models all.
SPARSE = {entry.name for entry in PEERS if entry.kind == "sparse"}
#: The native encoder's precisions, by contender.
NATIVE: dict[str, Literal["int8", "bf16"]] = {"bertopt native int8": "int8", "bertopt native bf16": "bf16"}


def reference(kind: Kind) -> Entry:
    return next(entry for entry in PEERS if entry.name == REFERENCES[kind])


def ours(name: str, directory: Path, kind: Kind) -> Entry:
    """An artefact. Raises FileNotFoundError where there is none."""
    if not (directory / "manifest.json").is_file():
        raise FileNotFoundError(f"'{directory}' is no artefact: it has no manifest.json; export one first")
    return Entry(name, None, "ours:load", peer=False, kind=kind, directory=directory.resolve())


def wanted(checkpoint: Checkpoint, artefacts: Sequence[Entry], only: Sequence[str], everyone: bool = False) -> list[Entry]:
    """Peers for this kind of checkpoint, the native encoder and artefacts. Raises ValueError for a name in `only` that is none."""
    native = [Entry(name, None, "ours:load", peer=False, kind=checkpoint.kind) for name in NATIVE]
    entries = [*(entry for entry in PEERS if entry.kind == checkpoint.kind), *native, *artefacts]
    known = [entry.name for entry in (*PEERS, *native, *artefacts)]
    for name in only:
        if name not in known:
            raise ValueError(f"--only must name contenders of {known}; got '{name}'")
    few = SPARSE if checkpoint.kind == "sparse" else FASTEST if checkpoint.large else FASTEST | OTHERS
    return [entry for entry in entries if entry.name in only or (not only and (everyone or not entry.peer or entry.name in few))]


@dataclass(frozen=True)
class Ready:
    """A contender that can be started; `identity` changes when what it runs does."""

    entry: Entry
    python: Path
    path: tuple[Path, ...]
    options: dict[str, Any]
    identity: str

    def on_one_thread(self) -> Ready:
        """The same with one thread on the first of its cores."""
        return replace(self, options={**self.options, "threads": 1, "streams": 0, "cores": self.options["cores"][:1]})


def ready(
    entry: Entry, checkpoint: Checkpoint, source: Path, folder: Path, texts: Path, options: dict[str, Any]
) -> Ready:
    """Build environment and model where they are missing. `texts` has a train.jsonl. Raises BuildError."""
    if not entry.peer:
        artefact = entry.directory or native_artefact(source, folder / "models" / checkpoint.name, NATIVE[entry.name])
        return Ready(
            entry, Path(sys.executable), (ROOT,), {**options, "load": entry.load, "directory": str(artefact)},
            hashlib.sha256((artefact / "manifest.json").read_bytes()).hexdigest()[:16],
        )  # fmt: skip
    assert entry.environment is not None
    python, directory = environments.environment(entry.environment, folder), source
    if entry.made:
        # Calibration of the large random model is kept short: its figures are about speed.
        samples = 16 if checkpoint.work > 2 else 0
        directory = environments.built(
            entry.made,
            python,
            source,
            folder / "models" / source_name(checkpoint) / entry.made,
            texts,
            samples,
        )
    found = {**options, **entry.options, "load": entry.load, "directory": str(directory)}
    mark = (directory if entry.made else folder / entry.environment) / "made-from"
    return Ready(entry, python, (), found, hashlib.sha256(mark.read_bytes()).hexdigest()[:16])


def source_name(checkpoint: Checkpoint) -> str:
    return checkpoint.same_as or checkpoint.name


def native_artefact(source: Path, folder: Path, precision: Literal["int8", "bf16"]) -> Path:
    """What the pass build_native makes of a checkpoint, without the checks of a run; kept unless source or packer changed.
    Raises BuildError where this machine cannot."""
    from bertopt import stages
    from bertopt.core import Context
    from bertopt.modeling import checkpoint
    from bertopt.passes import BuildNative
    from bertopt.system import native_import

    out, part, parent = (folder / f"native-{precision}{end}" for end in ("", ".part", ".parent"))
    mark = out.with_suffix(".made-from")
    try:
        module = native_import.native()
        digest = hashlib.sha256(f"{source} {module.__version__} ".encode())
        for path in sorted(Path(module.__file__).parent.iterdir()):
            digest.update(path.read_bytes() if path.is_file() else b"")
        if mark.is_file() and mark.read_text("utf-8") == digest.hexdigest():
            return out
        for directory in (part, parent, out):
            shutil.rmtree(directory, ignore_errors=True)
        part.mkdir(parents=True)
        parent.mkdir()
        reference = checkpoint.load(source)
        checkpoint.write_snapshot(reference, parent)
        model = BuildNative(precision=precision)(reference, Context(part)).model
        stages.inherit(parent, part)
        stages.write_form(model, part)
        stages.write_manifest(part, {"name": "native", **stages.describe(model)})
    except BertoptError as error:
        raise environments.BuildError(f"{precision}: {error}") from error
    shutil.rmtree(parent)
    part.rename(out)
    mark.write_text(digest.hexdigest(), "utf-8")
    return out


def calibration(train: Path, folder: Path) -> Path:
    """A folder with the texts peers calibrate on, in the form their loaders take."""
    out = folder / "models" / "calibration"
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(train, out / "train.jsonl")
    return out
