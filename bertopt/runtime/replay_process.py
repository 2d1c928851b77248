"""`python -m bertopt.runtime.replay_process`: open an artefact in this new interpreter and write its outputs for fixed texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bertopt.errors import BertoptError
from bertopt.passes import registry
from bertopt.runtime import replay
from bertopt.runtime.load import load


def main() -> None:
    """Answer the request on stdin: `directory`, `device`, `threads`, the caller's `passes`, and the file to write."""
    request = json.load(sys.stdin)
    registry.add_importable(request["passes"])
    try:
        predictor = load(request["directory"], request["device"], request["threads"])
        outcome: dict[str, Any] = {"answers": replay.answers(predictor)}
    except BertoptError as error:
        outcome = {"error": [type(error).__name__, str(error)]}
    Path(request["out"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
