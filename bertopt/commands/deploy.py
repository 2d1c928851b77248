"""`bertopt deploy`: an artefact in the layout that a serving system reads."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from bertopt import stages
from bertopt.core import Spec
from bertopt.errors import UsageError
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.serve.settings import default_name
from bertopt.serve.triton import PARAMETERS
from bertopt.stages import Manifest

#: Rows of one request at most, and texts that Triton hands over at once.
MAX_BATCH = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]+")

_MODEL = '''"""Serves the artefact in the folder beside this file; written by `bertopt deploy triton`."""

from bertopt.serve.triton import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
input [
  {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "text_pair" data_type: TYPE_STRING dims: [ 1 ] optional: {optional} }}
]
output [
  {{ name: "{output}" data_type: {type} dims: [ {width} ] }}
]
# Without a delay: requests gather while the model is busy, and a lone one does not wait.
dynamic_batching {{ }}
instance_group [ {{ count: 1 kind: {kind} }} ]
{parameters}"""
_PARAMETER = """\
parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}
"""
_GRAPH_CONFIG = """\
name: "{name}"
{backend}
max_batch_size: {max_batch}
input [
{inputs}
]
output [
{outputs}
]
# Requests of one length only are merged: shorter texts must be padded, with attention_mask 0, to share a batch.
dynamic_batching {{ }}
instance_group [ {{ count: 1 kind: {kind} }} ]
"""
#: For each form: Triton's backend, what it calls the model's file, and the suffixes of files that lie beside it.
_BACKENDS = {
    "onnx": ('backend: "onnxruntime"', "model.onnx", ()),
    "openvino": ('backend: "openvino"', "model.xml", (".bin",)),
    "engine": ('platform: "tensorrt_plan"', "model.plan", ()),
}


def triton(
    directory: Path, repository: Path, name: str | None = None, max_batch: int = MAX_BATCH, graph: bool = False, key: Path | None = None,
    how: AnswerOptions = DEFAULTS,
) -> list[Path]:  # fmt: skip
    """Write `repository/NAME` for Triton's Python backend, with a copy of the artefact, and with `graph` also `NAME_graph`, the
    graph alone for the backend of its runtime: token ids in, outputs out. Return the folders.

    Of `how`, `aggregation_strategy` and `stride` go into the model's configuration. A model that is there is not replaced: UsageError, as
    for a graph that is not fed one text a row, and for an option that the task does not have. Raises IntegrityError where the artefact is
    not the one exported, or with the public `key` not signed with it.
    """
    manifest = stages.verify(directory, key)
    how.check(manifest.spec)
    name = name or default_name(directory)
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise UsageError(f"a model's name must consist of letters, digits, '.', '_' and '-'; got '{name}': give another one with --name")
    if max_batch < 1:
        raise UsageError(f"max_batch must be at least 1; got {max_batch}")
    if graph and (manifest.form not in _BACKENDS or manifest.spec.layout != "padded"):
        raise UsageError(
            f"Triton's own backends run padded graphs of {', '.join(_BACKENDS)}; got {manifest.spec.layout} {manifest.form}: "
            "leave out --graph, or export with `optimize --portable`"
        )
    targets = [repository / name, *([repository / f"{name}_graph"] if graph else [])]
    for target in targets:
        if target.exists():
            raise UsageError(f"'{target}' is there already; remove it, or give another name with --name")
    repository.mkdir(parents=True, exist_ok=True)
    kind = "KIND_GPU" if manifest.device == "cuda" else "KIND_CPU"
    # Triton may be watching the repository: each model appears whole.
    with tempfile.TemporaryDirectory(dir=repository, prefix=f".{name}.part-") as made:
        for target in targets:
            (Path(made) / target.name / "1").mkdir(parents=True)
        part = Path(made) / name
        shutil.copytree(directory, part / "1" / "artifact")
        stages.verify(part / "1" / "artifact", key)
        (part / "1" / "model.py").write_text(_MODEL)
        (part / "config.pbtxt").write_text(_config(name, manifest.spec, max_batch, kind, how))
        if graph:
            _write_graph(Path(made) / f"{name}_graph", part / "1" / "artifact", manifest, max_batch, kind)
        for target in targets:
            (Path(made) / target.name).rename(target)
    return targets


def _config(name: str, spec: Spec, max_batch: int, kind: str, how: AnswerOptions) -> str:
    whole = spec.granularity == "text"
    chosen = {key: getattr(how, key) for key in PARAMETERS if getattr(how, key) != getattr(DEFAULTS, key)}
    return _CONFIG.format(
        name=name, max_batch=max_batch, optional=str(spec.task != "question-answering").lower(), output=spec.outputs[0] if whole else "answers",
        type="TYPE_FP32" if whole else "TYPE_STRING", width=spec.output_size if whole else 1, kind=kind,
        parameters="".join(_PARAMETER.format(key=key, value=value) for key, value in chosen.items()),
    )  # fmt: skip


def _write_graph(folder: Path, artifact: Path, manifest: Manifest, max_batch: int, kind: str) -> None:
    assert manifest.path is not None
    spec, source = manifest.spec, artifact / manifest.path
    backend, file, beside = _BACKENDS[manifest.form]
    shutil.copy(source, folder / "1" / file)
    for suffix in beside:
        shutil.copy(source.with_suffix(suffix), (folder / "1" / file).with_suffix(suffix))
    for data in source.parent.glob(f"{source.name}?data"):  # weights that an ONNX file names
        shutil.copy(data, folder / "1" / data.name)
    dims = {"text": f"{spec.output_size}", "token": f"-1, {spec.output_size}", "span": "-1"}[spec.granularity]
    most = min([max_batch, *(profile.max[0] for profile in manifest.engine.profiles)]) if manifest.engine else max_batch
    config = _GRAPH_CONFIG.format(
        name=folder.name, backend=backend, max_batch=most, kind=kind,
        inputs=",\n".join(f'  {{ name: "{one}" data_type: TYPE_INT64 dims: [ -1 ] }}' for one in spec.network_inputs),
        outputs=",\n".join(f'  {{ name: "{one}" data_type: TYPE_FP32 dims: [ {dims} ] }}' for one in spec.outputs),
    )  # fmt: skip
    (folder / "config.pbtxt").write_text(config)
