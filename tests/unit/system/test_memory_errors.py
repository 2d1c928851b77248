"""Failures that come of too little memory say so, whatever the library raised."""

from __future__ import annotations

import resource
import signal

import pytest
import typer

from bertopt.cli.app import exit_codes
from bertopt.errors import IntegrityError, ResourceError
from bertopt.system import limits, out_of_memory, untrusted
from bertopt.workers import diagnosis
from bertopt.workers.server import _describe

ODD = RuntimeError("could not create a primitive")


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "address_space_bytes", lambda: 2**30)


@pytest.mark.parametrize(("used", "said"), [(900_000, True), (400_000, False)])
def test_little_is_left_where_over_half_was_used(little: None, used: int, said: bool) -> None:
    found = limits.little_address_space(f"VmPeak:\t  {used} kB\nVmSize:\t 1 kB\n")
    assert (found is not None) == said
    if found:
        assert found == "address space is limited to 1.0 GiB (ulimit -v) and 0.9 GiB of it were used; raise the limit"


@pytest.mark.parametrize(("used", "said"), [(900_000, True), (400_000, False)])
def test_a_limit_of_data_alone_is_named(monkeypatch: pytest.MonkeyPatch, used: int, said: bool) -> None:
    """Allocators count against `ulimit -d`, whatever the address space: files and libraries that are mapped do not."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30) if kind == resource.RLIMIT_DATA else unlimited)
    found = limits.little_address_space(f"VmPeak:\t 999999999 kB\nVmData:\t  {used} kB\n")
    assert found == ("memory for data is limited to 1.0 GiB (ulimit -d) and 0.9 GiB of it were used; raise the limit" if said else None)


def test_without_a_limit_nothing_is_blamed_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.little_address_space("VmPeak:\t 999999999 kB\n") is None
    assert _describe(ODD)["type"] == "WorkerRaised"


@pytest.mark.usefixtures("little")
def test_what_a_worker_raises_under_a_small_limit_is_about_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "little_address_space", lambda: "raise the limit")
    said = _describe(ODD)
    assert (said["type"], said["message"]) == ("ResourceError", "RuntimeError: could not create a primitive; raise the limit")
    assert _describe(IntegrityError("x"))["type"] == "IntegrityError"
    with pytest.raises(ResourceError, match="raise the limit"), untrusted.reading("a tokenizer", "export again"):
        raise ODD
    with pytest.raises(typer.Exit) as ended, exit_codes(False):
        raise ODD
    assert ended.value.exit_code == 5
    with pytest.raises(typer.Exit) as ended, exit_codes(False):
        raise typer.Exit(3)
    assert ended.value.exit_code == 3


@pytest.mark.parametrize(
    "text",
    ["memory allocation of 4194304 bytes failed", "ImportError: /x.so: failed to map segment from shared object",
     "std::bad_alloc", "OSError: [Errno 12] Cannot allocate memory", "MemoryError"],
)  # fmt: skip
def test_messages_that_speak_of_memory(text: str) -> None:
    assert out_of_memory.said(text)
    assert _describe(RuntimeError(text))["type"] == "ResourceError"


def test_a_crash_is_blamed_on_memory_only_under_a_limit_below_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, blamed in ((None, False), (2**30, True), (limits.host_memory_bytes() * 4, False)):
        monkeypatch.setattr(limits, "address_space_bytes", lambda limit=limit: limit)
        crashed = diagnosis.worker_ended("open", -signal.SIGSEGV, [], "no last words")
        assert isinstance(crashed, ResourceError) == blamed and crashed.log == "no last words"
        assert isinstance(diagnosis.server_ended(1, "no last words"), ResourceError) == blamed
