"""ONNX Runtime, imported so that it sends nothing over the network.

From version 1.29 on, unless a variable says no when it is imported, it keeps an id of the machine and a database in the user's
home, and reports machine, models and sessions to Microsoft. Its `disable_telemetry_events` comes too late for the first report.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

#: Set when it is imported, it reports nothing.
SWITCH = "ORT_DISABLE_TELEMETRY"


def module(name: str = "onnxruntime") -> Any:
    """Import `onnxruntime`, or a module of it, and return it. Raises ImportError where it is missing."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        return importlib.import_module(name)
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before
