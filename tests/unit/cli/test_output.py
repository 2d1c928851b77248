"""What the command line prints, on any terminal."""

from __future__ import annotations

import io
import json

from bertopt.cli.app import escaping


def test_what_a_terminal_does_not_know_is_escaped() -> None:
    """`inspect` ended in a UnicodeEncodeError, as for a bug, where the locale was C."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    escaping(stream)
    print("1.3 × 同 🤖", file=stream, flush=True)
    assert written.getvalue() == b"1.3 \\u00d7 \\u540c \\ud83e\\udd16\n"
    assert json.loads(b'"' + written.getvalue().strip() + b'"') == "1.3 × 同 🤖"
    escaping(io.StringIO())  # a stream that encodes nothing
