"""Compare a stage's weights with its parent's: a cast must be exactly their rounding, a quantiser within half a step.

A certificate looks at the files on disk. It does not look at what a runtime does with them, which parity does.
"""

from __future__ import annotations

from bertopt.core import Compiled, Eager, Model, Native, Onnx, OpenVino
from bertopt.results.fidelity import Certificate


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
    if isinstance(model, OpenVino) and isinstance(parent, Onnx):
        from bertopt.stages import openvino_certificate

        return openvino_certificate.certify(model, parent)
    if isinstance(model, Native) and isinstance(parent, Eager):
        from bertopt.stages import native_certificate

        return native_certificate.certify(model, parent)
    return Certificate(status="none", reason=f"weights of form '{model.form}' cannot be compared with form '{parent.form}'")
