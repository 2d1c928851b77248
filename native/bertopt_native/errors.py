"""The errors of this package. Whoever catches `ValueError` and `RuntimeError` catches them all."""

from __future__ import annotations

from bertopt_native._core import BadFile, Unsupported

__all__ = ["BadFile", "Unsupported"]
