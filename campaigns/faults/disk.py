"""Give exports places that cannot hold them: `python -m campaigns.faults.disk [--times 40]`.

File systems of too small a size and read-only ones (mounted in a namespace, which needs root), a limit on the size of a
file, and outputs of odd names or of the wrong kind. Each export must end in a promised exit code without a traceback,
and a finished output must open on a read-only file system.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from campaigns.faults import exports, outcome

MOUNTED = 'mount -t tmpfs -o size="$0" none "$1" && shift 2 && exec "$@"'
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
#: Bytes of file systems that are too small, up to one that is enough for some stages.
SIZES = (4096, 16_384, 65_536, 131_072, 262_144, 524_288, 786_432, 1_048_576, 1_310_720, 1_572_864)
#: Exit codes by what is wrong with the place. 0: it was large enough after all.
FULL, REFUSED = (0, 5), (2,)
#: What of an output may not be written to: all of it, or a directory in it.
SHUT = ("parent", ".", "stages", "checks")


def places(out: Path) -> dict[str, tuple[Callable[[], object], Path, tuple[int, ...]]]:
    """What prepares each place, the place, and what is promised of it."""
    def nothing() -> None:
        pass

    def folder() -> Path:
        out.mkdir(parents=True)
        return out

    return {
        "a file": (lambda: out.write_text("x"), out, REFUSED),
        "below a file": (lambda: out.write_text("x"), out / "below", REFUSED),
        "a dangling link": (lambda: out.symlink_to(out.parent / "nowhere"), out, (0, 2)),
        "a link to itself": (lambda: out.symlink_to(out), out, REFUSED),
        "a name of 300 characters": (nothing, out / ("n" * 300), REFUSED),
        "a path of 5,000 characters": (nothing, out.joinpath(*["n" * 100] * 50), REFUSED),
        "spaces and quotes": (nothing, out / "a b'c\"d", (0,)),
        "a line break": (nothing, out / "a\nb", (0,)),
        "another alphabet": (nothing, out / "выход-出力", (0,)),
        "bytes that are no UTF-8": (nothing, Path(os.fsdecode(os.fsencode(out) + b"-\xff")), (0, 2)),
        "an escape sequence": (nothing, out / "a\x1b[31mb", (0,)),
        "a format": (nothing, out / "%s{0}", (0,)),
        "stages is a file": (lambda: (folder() / "stages").write_text("x"), out, REFUSED),
        "checks is a file": (lambda: (folder() / "checks").write_text("x"), out, REFUSED),
        "stages is a link to nothing": (lambda: (folder() / "stages").symlink_to("nowhere"), out, (0, 2)),
        "artifact is somebody else's": (lambda: (out / "artifact" / "mine").mkdir(parents=True), out, REFUSED),
        "report.json is a directory": (lambda: (out / "report.json").mkdir(parents=True), out, REFUSED),
        "the lock is a directory": (lambda: (out / ".lock").mkdir(parents=True), out, REFUSED),
        "a named pipe": (lambda: os.mkfifo(out), out, REFUSED),
        "a device": (nothing, Path("/dev/null/out"), REFUSED),
        "below /proc": (nothing, Path("/proc/out"), REFUSED),
        "artifact is a file": (lambda: (folder() / "artifact").write_text("x"), out, REFUSED),
    }  # fmt: skip


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Try the first `times` places."""
    result, recipe = outcome.Outcome(), exports.recipe_in(scratch)
    root = os.geteuid() == 0 and shutil.which("unshare") is not None
    cases: list[tuple[str, Callable[[], str | None]]] = [
        *((f"odd places: {name}", lambda name=name: _odd(recipe, scratch / "place", name)) for name in places(scratch)),
        *(("files limited in size", lambda size=size: _limited(recipe, scratch, size)) for size in SIZES[::3]),
        *(("disk full", lambda size=size: _mounted(recipe, scratch, size)) for size in (SIZES if root else ())),
        *(("no permission", lambda name=name: _forbidden(recipe, scratch / "shut", name)) for name in (SHUT if root else ())),
        *((("finished output, read-only", lambda: _finished(recipe, scratch)),) if root else ()),
    ]
    for what, tried in outcome.in_time(_spread(cases)[:times]):
        result.count(what.partition(":")[0], f"{what}: {problem}" if (problem := tried()) else None)
    if not root:
        result.notes["left out"] = "full and read-only file systems: they need root"
    return result


def _spread(cases: list[tuple[str, Callable[[], str | None]]]) -> list[tuple[str, Callable[[], str | None]]]:
    """The cases with each kind early, so that a short run sees all."""
    kinds: dict[str, int] = {}
    order = []
    for case in cases:
        kind = case[0].partition(":")[0]
        kinds[kind] = kinds.get(kind, -1) + 1
        order.append(kinds[kind])
    return [case for _, _, case in sorted(zip(order, range(len(cases)), cases, strict=True))]


def _odd(recipe: Path, out: Path, name: str) -> str | None:
    shutil.rmtree(out.parent / "odd", ignore_errors=True)
    (out.parent / "odd").mkdir()
    prepare, place, promised = places(out.parent / "odd" / "out")[name]
    prepare()
    problem = exports.judged(*exports.ended(exports.start(recipe, place)), promised)
    if name == "artifact is somebody else's" and not (out.parent / "odd" / "out" / "artifact" / "mine").is_dir():
        problem = "somebody else's files are gone"
    return problem


def _limited(recipe: Path, scratch: Path, size: int) -> str | None:
    out = scratch / f"limited-{size}"
    return exports.judged(*exports.ended(exports.start(recipe, out, prefix=("prlimit", f"--fsize={size}"))), FULL)


def _forbidden(recipe: Path, out: Path, name: str) -> str | None:
    """Export as a user who may not write everywhere: root, without the right to pass over permissions."""
    shutil.rmtree(out.parent / "shut", ignore_errors=True)
    shut = out / name
    shut.mkdir(parents=True)
    shut.chmod(0o555)
    prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
    place = shut / "out" if name == "parent" else out
    try:
        return exports.judged(*exports.ended(exports.start(recipe, place, prefix=prefix)), REFUSED)
    finally:
        shut.chmod(0o755)


def _mounted(recipe: Path, scratch: Path, size: int) -> str | None:
    mount = scratch / "mount"
    mount.mkdir(exist_ok=True)
    prefix = ("unshare", "-m", "sh", "-c", MOUNTED, str(size), str(mount), "--")
    return exports.judged(*exports.ended(exports.start(recipe, mount / "out", prefix=prefix)), FULL)


def _finished(recipe: Path, scratch: Path) -> str | None:
    """Load, verify and inspect a finished output where nothing can be written, and see that a new run is refused."""
    out = scratch / "finished"
    code, said = exports.ended(exports.start(recipe, out))
    if code:
        return f"exit {code}: {said[-300:]}"
    load = f"import bertopt; assert len(bertopt.load({str(out / 'artifact')!r})(['a cat', 'a dog'])) == 2"
    commands = {
        "load": ["-c", load], "verify": ["-m", "bertopt", "verify", str(out / "artifact")],
        "inspect": ["-m", "bertopt", "inspect", str(out / "artifact")],
    }  # fmt: skip
    prefix = ["unshare", "-m", "sh", "-c", READ_ONLY, str(out)]
    for name, command in commands.items():
        ended = subprocess.run([*prefix, sys.executable, *command], capture_output=True, text=True, check=False, cwd=exports.ROOT)
        if ended.returncode:
            return f"{name} ends with {ended.returncode}: {ended.stderr[-300:]}"
    code, said = exports.ended(exports.start(recipe, out, prefix=prefix))
    return exports.judged(code, said, REFUSED)


if __name__ == "__main__":
    sys.exit(outcome.main("disk", __doc__ or "", run, 40))
