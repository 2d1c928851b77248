"""Make sure that the files that are loaded are those that were hashed: loaders open files by name, after the hash.

If other users may write to the files, they are copied to a private directory, and hashed and loaded there. Otherwise they are loaded in
place, and refused if one changed during the load, as in a deployment. Not looked at: changes after the load, and root.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bertopt.errors import IntegrityError, ResourceError, UsageError
from bertopt.stages.manifest import MANIFEST, Manifest, verify
from bertopt.stages.signature import SIGNATURE
from bertopt.system import temporary_directory
from bertopt.system.untrusted import plain

#: Resolution of file systems' time stamps, with room: a file must be older than this, or a second change may not show in its time.
_TICK_NS = 50_000_000


@dataclass
class Opened:
    """A verified directory: load from `path` while the context is open."""

    path: Path
    manifest: Manifest
    copy: temporary_directory.TemporaryDirectory | None = None

    def keep_for(self, owner: object) -> None:
        """Keep a private copy as long as `owner` lives: some runtimes read a model again."""
        if self.copy is not None:
            weakref.finalize(owner, self.copy.cleanup)
            self.copy = None


@contextlib.contextmanager
def opening(directory: Path, key: Path | None = None) -> Iterator[Opened]:
    """Verify `directory`, and its signature if a public `key` is given; load from `Opened.path` inside the context.

    Raises UsageError where it cannot be opened or its path is not UTF-8, IntegrityError as `verify` does, and on leaving where a file changed since it was hashed.
    """
    try:
        str(directory).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the directory of an artefact must be a path in UTF-8, or libraries cannot open its files; got {os.fsencode(directory)!r}: rename it"
        ) from error
    try:
        copied = _others_may_write(directory)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"'{plain(str(directory))}' cannot be opened ({why}); give the directory of a stage or artefact, such as out/NAME/artifact, which "
            "`bertopt optimize MODEL` makes"
        ) from error
    if copied:
        opened = _copied(directory, key)
        try:
            yield opened
        finally:
            if opened.copy is not None:
                opened.copy.cleanup()
        return
    before = _stamps(directory)
    manifest = verify(directory, key)
    yield Opened(directory, manifest)
    if changed := dict(_stamps(directory).items() ^ before.items()):
        # A directory that was replaced is "." here, and so is one in which a file was.
        named = directory / min(changed.keys() - {"."}, default=".")
        raise IntegrityError(f"'{plain(str(named))}' was changed while the artefact was loaded; load it again when nobody writes there")


def _copied(directory: Path, key: Path | None) -> Opened:
    manifest = verify(directory, key)
    copy = temporary_directory.make()
    try:
        for name in (*manifest.files, MANIFEST, SIGNATURE):
            entry = manifest.files.get(name)
            if entry is not None or (directory / name).exists():
                _copy(directory / name, Path(copy.name) / name, entry.size if entry else None)
        return Opened(Path(copy.name), verify(Path(copy.name), key), copy)
    except OSError as error:
        copy.cleanup()
        raise ResourceError(
            f"others may write to '{directory}', so it is copied before it is loaded, and '{copy.name}' cannot hold the copy "
            f"({error.strerror}); free space there, set TMPDIR, or run: chmod -R go-w '{directory}'"
        ) from error
    except BaseException:
        copy.cleanup()
        raise


def _copy(source: Path, target: Path, size: int | None) -> None:
    """Copy a file that is not a link, at most one byte more than its expected size."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file, target.open("wb") as out:
        left = size + 1 if size is not None else 1 << 30
        while left and (piece := file.read(min(left, 1 << 22))):
            out.write(piece)
            left -= len(piece)


def _stamps(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return for everything in `directory` figures that change when it is written to or replaced. A ctime cannot be set."""
    stamps: dict[str, tuple[int, ...]] = {}
    for path in (directory, *directory.rglob("*")):
        try:
            seen = path.lstat()
        except FileNotFoundError:  # removed since it was listed: `verify` or the other stamps miss it
            continue
        name = str(path.relative_to(directory))
        stamps[name] = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
    age = time.time_ns() - max((stamp[-1] for stamp in stamps.values()), default=0)
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)
    return stamps


def _others_may_write(directory: Path) -> bool:
    """Return whether another user, except root, may change or replace a file of `directory`."""
    if any(_writable(path.lstat()) for path in (directory, *directory.rglob("*"))):
        return True
    # Users who may write to a parent directory may rename what is in it, unless it is sticky.
    return any(_writable(seen) and not seen.st_mode & stat.S_ISVTX for seen in map(Path.stat, directory.resolve().parents))


def _writable(seen: os.stat_result) -> bool:
    if stat.S_ISLNK(seen.st_mode):  # refused by `verify`
        return False
    if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & stat.S_IWOTH:
        return True
    return bool(seen.st_mode & stat.S_IWGRP) and seen.st_gid != 0 and not _private_group(seen.st_gid)


def _private_group(group: int) -> bool:
    """Return whether a group is this user's private group, by name and members, as most Linux systems create for each user."""
    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}
