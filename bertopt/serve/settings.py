"""Settings of a server: where it listens, and what bounds a request and the queue."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from bertopt.errors import UsageError

#: The longest time, about 25 days: Linux counts a connection's milliseconds in 31 bits.
LONGEST_S = 2_147_483
_NAME = re.compile(r"[\w.-]{1,96}")


@dataclass(frozen=True)
class Settings:
    """Bounds and options. Sizes are bytes, times seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    queue_tokens: int = 262_144
    """Tokens that may wait; beyond, requests get 429."""
    concurrent_requests: int = 512
    """Requests at work at once, of all models; beyond, requests get 429 before their bodies are read."""
    request_texts: int = 1024
    request_bytes: int = 4_000_000
    timeout_s: float = 30.0
    """A request that is not answered by then gets 504 and leaves the queue; a body that is not there by then, 408."""
    cache_bytes: int = 0
    """Outputs kept, for each model; 0 keeps none."""
    truncate: bool = True
    """Whether texts are cut where a request does not say."""
    api_key: str | None = None
    drain_s: float = 0.0
    """How long a server that received SIGTERM goes on accepting while it says that it is not ready."""
    grace_s: float = 30.0
    """How long accepted requests may take then."""
    threads: int | None = None
    streams: int | None = None
    warm_up: bool = True
    key: Path | None = None
    """A public key that every artefact must be signed with."""

    def __post_init__(self) -> None:
        for name in ("queue_tokens", "concurrent_requests", "request_texts", "request_bytes", "timeout_s", "grace_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0; got {getattr(self, name)}")
        for name in ("cache_bytes", "drain_s"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("timeout_s", "drain_s", "grace_s"):
            if getattr(self, name) > LONGEST_S:
                raise UsageError(f"{name} must be at most {LONGEST_S}; got {getattr(self, name)}")
        if not self.host:
            raise UsageError("host must name an address of this machine; got an empty one: give 0.0.0.0 to listen on all")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be from 0 to 65535; got {self.port}")
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key must not be empty; leave it out, and requests need none")


def default_name(directory: Path) -> str:
    """Return what a model is called by default: as its directory, or as the directory of its run where that is `artifact`."""
    path = directory.resolve()
    return (path.name == "artifact" and path.parent.name) or path.name


def as_bytes(megabytes: float) -> int:
    """Return a size in bytes. Raises UsageError for what is none."""
    if not math.isfinite(megabytes):
        raise UsageError(f"a size must be a number of megabytes; got {megabytes}")
    return round(megabytes * 10**6)


def named(directories: list[str]) -> dict[str, Path]:
    """Return artefact directories by name, first to last: `NAME=DIR`, or DIR by its default name."""
    models: dict[str, Path] = {}
    for given in directories:
        name, equals, rest = given.partition("=")
        path = Path(rest if equals and not Path(given).exists() else given)
        if path == Path(given):
            name = default_name(path)
        if not _NAME.fullmatch(name):
            raise UsageError(f"a model's name must be letters, digits, '.', '_' or '-'; got '{name}': give NAME=DIR")
        if name in models:
            raise UsageError(f"two artefacts are called '{name}'; name them: NAME=DIR")
        models[name] = path
    return models
