"""Find where a stage goes wrong: the first layer and tensor whose error jumps, and what to keep in float32."""

from __future__ import annotations

#: The module whose `Ops` a worker needs to look into stages.
OPERATIONS = "bertopt.debug.operations"
