"""`bertopt deploy`: an artefact in the layout that a serving system reads."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

from bertopt import stages
from bertopt.errors import UsageError

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
"""


def triton(directory: Path, repository: Path, name: str | None = None, max_batch: int = MAX_BATCH) -> Path:
    """Write `repository/NAME` for Triton's Python backend, with a copy of the artefact; return that folder.

    A model that is there is not replaced: UsageError. Raises IntegrityError where the artefact is not the one exported.
    """
    manifest = stages.verify(directory)
    name = name or directory.resolve().name
    if not _NAME.fullmatch(name) or set(name) == {"."}:
        raise UsageError(f"a model's name must consist of letters, digits, '.', '_' and '-'; got '{name}': give another one with --name")
    if max_batch < 1:
        raise UsageError(f"max_batch must be at least 1; got {max_batch}")
    target = repository / name
    if target.exists():
        raise UsageError(f"'{target}' is there already; remove it, or give another name with --name")
    spec = manifest.spec
    whole = spec.granularity == "text"
    config = _CONFIG.format(
        name=name, max_batch=max_batch, optional=str(spec.task != "question-answering").lower(),
        output=spec.outputs[0] if whole else "answers", type="TYPE_FP32" if whole else "TYPE_STRING",
        width=(len(spec.labels) or spec.hidden) if whole else 1, kind="KIND_GPU" if manifest.device == "cuda" else "KIND_CPU",
    )  # fmt: skip
    repository.mkdir(parents=True, exist_ok=True)
    # Triton may be watching the repository: the model appears whole.
    with tempfile.TemporaryDirectory(dir=repository, prefix=f".{name}.part-") as made:
        part = Path(made) / name
        part.mkdir()
        shutil.copytree(directory, part / "1" / "artifact")
        stages.verify(part / "1" / "artifact")
        (part / "1" / "model.py").write_text(_MODEL)
        (part / "config.pbtxt").write_text(config)
        part.rename(target)
    return target
