"""What the options of `bertopt serve` mean."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from bertopt.cli import app
from bertopt.serve.settings import Settings


def test_sizes_are_in_megabytes_of_a_million_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def serve(models: Any, settings: Settings, log_level: str) -> None:
        seen.append(settings)

    monkeypatch.setattr("bertopt.serve.server.serve", serve)
    for options in ((), ("--request-mb", "1", "--cache-mb", "2.5")):
        assert CliRunner().invoke(app, ["serve", "NAME=out/artifact", *options]).exit_code == 0
    assert [(each.request_bytes, each.cache_bytes) for each in seen] == [(4_000_000, 0), (1_000_000, 2_500_000)]


@pytest.mark.parametrize(("options", "said"), [
    (("--timeout", "inf"), "timeout_s must be at most"), (("--timeout", "nan"), "timeout_s must be more than 0; got nan"),
    (("--timeout", "3000000"), "timeout_s must be at most"), (("--grace", "inf"), "grace_s must be at most"),
    (("--drain", "nan"), "drain_s must be at least 0; got nan"), (("--request-mb", "nan"), "a size must be a number of megabytes"),
    (("--cache-mb", "inf"), "a size must be a number of megabytes"), (("--host", ""), "give 0.0.0.0 to listen on all"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_opened(options: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With some of these a server started, said that it listens, and answered nothing; with an empty host it listened on all addresses."""
    monkeypatch.setattr("bertopt.serve.server.serve", lambda *_: None)
    done = CliRunner().invoke(app, ["serve", "NAME=out/artifact", *options])
    assert done.exit_code == 2 and said in done.stderr


def test_an_empty_key_in_the_environment_does_not_leave_the_server_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertopt.serve.server.serve", lambda *_: None)
    for key, code in (("", 2), ("  ", 2), ("a", 0), (None, 0)):
        done = CliRunner().invoke(app, ["serve", "NAME=out/artifact"], env={"BERTOPT_API_KEY": key})
        assert done.exit_code == code and ("must not be empty" in done.stderr) == bool(code)


def test_a_signal_before_the_port_is_open_is_not_taken_for_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import uvicorn

    from bertopt.serve import server

    def ended(self: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr("bertopt.serve.app.create", lambda *_: SimpleNamespace(state=SimpleNamespace(bertopt=None)))
    monkeypatch.setattr(server, "_log_to_stderr", lambda level: None)  # loggers outlive the test
    monkeypatch.setattr(uvicorn.Server, "run", ended)
    with pytest.raises(SystemExit) as caught:
        server.serve({}, Settings())
    assert caught.value.code == 143


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_ends_a_server_as_sigterm_does(ignored: bool) -> None:
    """The command line's handler raised SystemExit inside a request, which got 500, and the server went on."""
    code = f"""
import signal
from types import SimpleNamespace
import uvicorn
from bertopt.serve import server
from bertopt.serve.settings import Settings
signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignored} else signal.SIG_DFL)  # `nohup` has it ignored
found = signal.getsignal(signal.SIGHUP)
state = SimpleNamespace(accepts=True, drain=lambda: print("drained"))
made = server._server(uvicorn.Config(lambda: None), state, Settings())
with made.capture_signals():
    signal.raise_signal(signal.SIGHUP)
assert signal.getsignal(signal.SIGHUP) == found
print(made.should_exit)
"""
    # In another process: a signal would end this one where the handler is missing.
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == (["False"] if ignored else ["drained", "True"])
