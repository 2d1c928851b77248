"""Tiny artefacts, built without workers or gates: what `bertopt.load` and `bertopt serve` open."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bertopt import stages
from bertopt.core import Context, Model, Onnx, Pass, Spec
from bertopt.system.temporary_directory import TemporaryDirectory

Form = Literal["eager", "onnx", "openvino", "native"]
_PARITY = {"worst": {"metric": "max_abs", "value": 1e-6, "limit": 1e-3, "where": "batch 1 × 8"}, "limits": {"max_abs": 1e-3}}


def write_prompted_artefact(checkpoint_directory: Path, out: Path, **prompts: str) -> Path:
    """Write the artefact of a sentence-transformers checkpoint to whose files `prompts` are added, and return `out`."""
    source = shutil.copytree(checkpoint_directory, out.with_name(f"{out.name}-checkpoint"))
    (source / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return write_artefact(source, out)


def write_artefact(checkpoint_directory: Path, out: Path, form: Form = "onnx", packed: bool = False) -> Path:
    """Write the artefact of a checkpoint in one `form`, with gates as a delivery records them, and return `out`."""
    return Path(shutil.copytree(_written(checkpoint_directory, form, packed), out))


def write_line(checkpoint_directory: Path, out: Path, *line: Pass[Any, Any], texts: Sequence[str] = ()) -> Path:
    """Write the artefact of a checkpoint after the passes of `line`, which calibrate on `texts`, and return `out`.

    Its manifest names the passes and the checkpoint, as a run's does, but no gates.
    """
    from bertopt.modeling import checkpoint
    from bertopt.runtime.tokenization import Tokenizer

    folder, digest = out.with_name(f".{out.name}.build"), _digest(checkpoint_directory)
    snapshot = folder / "snapshot"
    snapshot.mkdir(parents=True)
    with checkpoint.quiet():
        checkpoint.write_snapshot(checkpoint.load(str(checkpoint_directory)), snapshot)
        model: Model = checkpoint.open_directory(snapshot)
        tokenizer = Tokenizer(snapshot, model.spec)
        for number, step in enumerate(line):
            workdir = out if number == len(line) - 1 else folder / str(number)
            workdir.mkdir(parents=True)
            shapes = ((1, 8), (2, 16))
            model = step(model, Context(workdir, "cpu", shapes, tuple(texts), encode=lambda asked: tokenizer.batch(tokenizer.encode(asked)))).model
    stages.inherit(snapshot, out)
    stages.write_form(model, out)
    records = [step.record().model_dump() for step in line]
    key = hashlib.sha256(json.dumps([digest, records, texts]).encode()).hexdigest()
    fields = {"device": "cpu", "name": line[-1].name(), "passes": records, "checkpoint_sha256": digest, "key": key}
    stages.write_manifest(out, {**fields, **stages.describe(model)})
    shutil.rmtree(folder)
    return out


def reseal(directory: Path, **fields: Any) -> Path:
    """Hash the files of an artefact anew, as somebody may who changed them, and change its manifest's `fields`; return it."""
    before = stages.read_manifest(directory).model_dump(mode="json", exclude={"files", "manifest_sha256"})
    stages.write_manifest(directory, {**before, **fields})
    return directory


def write_placeholder(out: Path, spec: Spec) -> Path:
    """Write an artefact whose graph is none, for tests of what happens to files, and return `out`."""
    (out / "onnx").mkdir(parents=True)
    (out / "onnx" / "model.onnx").write_bytes(b"graph" * 100)
    (out / "config.json").write_text("{}")
    stages.write_manifest(out, {"key": "k", **stages.describe(Onnx(spec, "float32", out / "onnx" / "model.onnx"))})
    return out


_folder = TemporaryDirectory("artefacts-of-tests-")
_known: dict[tuple[str, Form, bool], Path] = {}


def _written(checkpoint_directory: Path, form: Form, packed: bool) -> Path:
    """Return an artefact that nobody changes. An export takes seconds: each is made once in this process."""
    key = (_digest(checkpoint_directory), form, packed)
    if key not in _known:
        _known[key] = _write(checkpoint_directory, Path(_folder.name) / f"{form}-{key[0]}{'-packed' * packed}", form, packed)
    return _known[key]


def _digest(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(directory)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _write(checkpoint_directory: Path, out: Path, form: Form, packed: bool) -> Path:
    from bertopt.modeling import checkpoint
    from bertopt.passes import BuildNative, ConvertOpenvino, ExportOnnx, PackSequences, UseSdpa

    graph = stages.open_stage(_written(checkpoint_directory, "onnx", packed)) if form == "openvino" else None
    reference = checkpoint.load(str(checkpoint_directory))
    folder = out.with_name(f".{out.name}.build")
    folder.mkdir(parents=True)
    out.mkdir(parents=True)
    checkpoint.write_snapshot(reference, folder)
    stages.inherit(folder, out)
    model: Any = reference
    if form == "eager":
        (out / "rewrites.json").write_text("[]\n")
    elif form == "native":
        model = BuildNative()(reference, Context(out)).model
    elif form == "openvino":
        model = ConvertOpenvino()(graph, Context(out)).model  # type: ignore[arg-type]
    else:
        network = (PackSequences() if packed else UseSdpa())(reference, Context(folder)).model
        model = ExportOnnx(opset=20)(network, Context(out)).model
    stages.write_form(model, out)
    gates: dict[str, Any] = {
        "status": "ok", "parity": _PARITY, "latency": None,
        "quality": None, "waived": [],
    }  # fmt: skip
    described = stages.describe(model)
    stages.write_manifest(out, {"device": "cpu", "name": form, "stage": form, "gates": gates, "recipe": {}, **described})
    return out
