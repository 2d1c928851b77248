"""Whatever a library raises over a foreign file is about the file, unless it cannot be."""

from __future__ import annotations

import errno

import pytest

from bertopt.errors import IntegrityError, ResourceError, UsageError
from bertopt.system.untrusted import plain, reading


class Panic(BaseException):
    """As the tokenizers library panics: no Exception."""


@pytest.mark.parametrize("error", [ValueError("bad\nmore"), KeyError("x"), Panic("index out of range"), RecursionError(), PermissionError(13, "Permission denied", "f")])
def test_what_is_raised_over_a_file_is_about_the_file(error: BaseException) -> None:
    with pytest.raises(IntegrityError, match=r"^the checkpoint cannot be read \(\w+: .*\); restore it$"), reading("the checkpoint", "restore it"):
        raise error


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")])
def test_memory_is_a_resource(error: BaseException) -> None:
    with pytest.raises(ResourceError, match="memory ran out while the checkpoint was read"), reading("the checkpoint", "restore it"):
        raise error


@pytest.mark.parametrize("error", [UsageError("x"), KeyboardInterrupt(), NameError("a bug of ours"), ModuleNotFoundError("no torch"), OSError(errno.ENOSPC, "full")])
def test_what_is_not_about_the_file_stays_what_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, reading("the checkpoint", "restore it"):
        raise error
    assert raised.value is error


def test_text_of_a_foreign_file_is_short_and_does_nothing_to_a_terminal() -> None:
    assert plain("a\x1b[2Jb\n狗") == "a\\x1b[2Jb\\n狗"
    assert len(plain("x" * 5000)) == 300
