"""The process that the tests' workers are forked from: it has imported what their recipes need, so that no worker imports it anew.

bertopt's own imports less, as it does not know which steps a recipe has.
"""

from __future__ import annotations

import importlib
import sys

from bertopt.workers import server

#: Beside what bertopt's own server imports. None of them starts a thread, which a fork would not have.
MODULES = (
    "bertopt.pipeline", "bertopt.sessions.torch", "bertopt.stages.certificates", "bertopt.stages.effects", "onnxscript.rewriter.ort_fusions",
    "optimum.exporters.tasks", "optimum.utils.normalized_config", "tests.support.example_passes", "tests.support.operations",
    "tests.support.uncovered_passes", "tokenizers", "torch.export._trace", "torch.onnx._internal.exporter._core",
    "transformers.models.bert.modeling_bert",
)  # fmt: skip
_own = server._preload


def preload() -> None:
    _own()
    for name in MODULES:
        importlib.import_module(name)
    server._preload = _own  # a replaced function of bertopt is what workers look for in a user's code


if __name__ == "__main__":
    server._preload = preload
    server.main(int(sys.argv[1]))
