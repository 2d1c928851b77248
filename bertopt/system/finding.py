"""What a check of `bertopt doctor` returns."""

from __future__ import annotations

from pydantic import BaseModel

#: What a finding can concern: every run ("all"), "gpu", "onnx_cuda", "compile_cuda" and "package_cuda" (a pass on a GPU), "hub"
#: (downloads), a precision ("int8", "bfloat16", "openvino_int8"), or a pass.
ALL = "all"


class Finding(BaseModel):
    """One cause: what was found, what it stops, and what mends it."""

    check: str
    found: str
    stops: str
    fix: str
    concerns: tuple[str, ...] = (ALL,)
    blocks: bool = False
    """Whether what it concerns cannot work at all, rather than slowly or by chance."""
    only_if_needed: bool = False
    """Whether it is shown only where the asked target or recipe needs what it concerns."""

    def __str__(self) -> str:
        return f"{self.found}; {self.stops}. Fix: {self.fix}"
