"""Mutate text and plain data, and watch what a reader does with it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

from bertopt.errors import UsageError

#: CPU seconds that a reader may take, and those after which it is given up.
SECONDS, GIVE_UP_S = 2.0, 60
#: What files hold that their reader's author did not think of.
TOKENS = (
    "", " ", "\t", "\n", "\r", "\0", ":", "-", "[", "]", "{", "}", ",", "&a", "*a", "!!python/object:os.system", "<<", "|", ">", "#", "'",
    '"', "\\", "\\ud800", "\\u0000", "\\x1b[2J", "\x1b[31m", "\ufeff", "\u2028", "\u202e", "é", "𝔘", "null", "~", "true", "yes", "no", "0", "-1",
    "010", "1e999", ".nan", ".inf", "-0", "9" * 400, "1_000", "0x10", "2024-13-45", "pass", "steps", "after", "reference", "name",
    "schema_version", "model", "limits", "int8", "timeout", "waivers", "deliver", "fastest", "pkg://", "~nobody/x", "../../..",
    "/dev/zero", "/proc/self/mem", "a" * 5000, "[" * 200, "{a: " * 60, "text", "label", "use_sdpa", "quantize_int8", "__class__", "%s", "{0}",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**400, 0.0, -0.0, 1e308, float("nan"), float("inf"), "", " ", "\0", "\ud800", "a" * 5000, [],
    {}, [[]], [None], {"": None}, {"a": {"b": []}}, b"bytes", (1, 2), {1: 2}, object(), "reference", "use_sdpa", "int8", "~", "\x1b[31m",
)  # fmt: skip


def text(rng: random.Random, base: str, other: str) -> str:
    """Return `base` after one to six edits, some of them from `other`."""
    for _ in range(rng.randint(1, 6)):
        at, end = sorted(rng.randint(0, len(base)) for _ in range(2))
        kind = rng.randrange(7)
        if kind == 0:
            base = base[:at] + rng.choice(TOKENS) + base[at:]
        elif kind == 1:
            base = base[:at] + base[min(end, at + 40) :]
        elif kind == 2:
            base = base[:at] + base[at : at + 60] + base[at:]
        elif kind == 3:
            base = base[:at] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD7FF)))) + base[at + 1 :]
        elif kind == 4:
            lines = base.split("\n")
            lines.insert(rng.randint(0, len(lines)), rng.choice(other.split("\n")))
            base = "\n".join(lines)
        elif kind == 5:
            lines = base.split("\n")
            rng.shuffle(lines) if rng.random() < 0.2 else lines.pop(rng.randrange(len(lines)))
            base = "\n".join(lines)
        else:
            words = base.split(" ")
            words[rng.randrange(len(words))] = rng.choice(TOKENS)
            base = " ".join(words)
    return base


def data(rng: random.Random, base: Any) -> Any:
    """Return `base` with one value, key or entry anywhere in it replaced, added or gone."""
    if isinstance(base, dict) and base and rng.random() < 0.8:
        new = dict(base)
        key = rng.choice(list(new))
        kind = rng.randrange(6)
        if kind == 0:
            del new[key]
        elif kind == 1:
            new[rng.choice([*TOKENS, 1, None, True])] = rng.choice(VALUES)
        else:
            new[key] = data(rng, new[key])
        return new
    if isinstance(base, list) and base and rng.random() < 0.8:
        new_list = list(base)
        at = rng.randrange(len(new_list))
        kind = rng.randrange(6)
        if kind == 0:
            del new_list[at]
        elif kind == 1:
            new_list.insert(at, rng.choice([*VALUES, new_list[at]]))
        else:
            new_list[at] = data(rng, new_list[at])
        return new_list
    return rng.choice(VALUES)


def verdict(read: Callable[[], object], slowest: list[float]) -> str | None:
    """Call a reader and return what was wrong with how it took it: anything but an answer or a UsageError fit to print."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"more than {GIVE_UP_S} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(GIVE_UP_S)
    started = time.process_time()
    try:
        read()
        said = ""
    except UsageError as error:
        said = str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {ascii(str(error))[:200]}"
    finally:
        signal.alarm(0)
        seconds = time.process_time() - started
        slowest.append(seconds)
    if seconds > SECONDS:
        return f"{seconds:.1f} s"
    if "\x1b" in said or "\0" in said:
        return "a control character reaches the terminal"
    if len(said) > 100_000:
        return f"{len(said)} characters are said"
    return None
