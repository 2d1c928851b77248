"""Compare a stage's weights with its parent's: a cast must be exactly their rounding, a quantiser within half a step.

A certificate looks at the files on disk. It does not look at what a runtime does with them, which parity does.
"""

from __future__ import annotations

from bertopt import stages
from bertopt.core import Compiled, Eager, Model, Native, Onnx, OpenVino
from bertopt.results.fidelity import Certificate
from bertopt.stages.manifest import Manifest

#: Passes that leave every weight as it is.
_KEEP_WEIGHTS = ("use_sdpa",)


def comparable(made: Manifest, parent: Manifest) -> bool:
    """Return whether the weights of a stage can be compared with those of `parent`: the stage that it was built from, or the checkpoint, of
    which an ONNX or OpenVINO graph keeps rows of its weights, and torch and a packed file whole ones where no pass changed them."""
    if len(made.passes) == len(parent.passes) + 1:
        return True
    if parent.passes or (made.form == "native" and not all(record.name in _KEEP_WEIGHTS for record in made.passes[:-1])):
        return False
    return made.form in ("onnx", "openvino", "native", "eager", "compiled") and not stages.runs_foreign_code(made)


def certify(model: Model, parent: Model) -> Certificate:
    """Compare the weights of `model`, made from `parent` by one pass, with the parent's."""
    if isinstance(model, Eager | Compiled) and isinstance(parent, Eager):
        from bertopt.stages import torch_certificate

        return torch_certificate.certify(model, parent)
    if isinstance(model, Onnx):
        from bertopt.stages import onnx_certificate

        if isinstance(parent, Eager):
            return onnx_certificate.exported(model, parent)
        if isinstance(parent, Onnx):
            return onnx_certificate.rewritten(model, parent)
    if isinstance(model, OpenVino) and isinstance(parent, Onnx | Eager):
        from bertopt.stages import openvino_certificate

        return openvino_certificate.certify(model, parent) if isinstance(parent, Onnx) else openvino_certificate.certify_by_rows(model, parent)
    if isinstance(model, Native) and isinstance(parent, Eager):
        from bertopt.stages import native_certificate

        return native_certificate.certify(model, parent)
    return Certificate(status="none", reason=f"weights of form '{model.form}' cannot be compared with form '{parent.form}'")
