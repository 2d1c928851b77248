"""Change delivered files and records: `python -m campaigns.faults.tampering [--times 700]`.

Of `times`, five in seven flip a bit in a file of an artefact, its manifest and signature included; one edits the manifest
and hashes it again, as somebody would who can; one edits a measurement record. Flips must be refused, edited manifests
must be refused where a key is given, and records must be refused or measured again.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.checks.measurements import StageMeasurements
from bertopt.errors import IntegrityError
from bertopt.pipeline.measurement_cache import Records
from bertopt.stages import signature
from campaigns.faults import exports, forked, fuzzing, outcome


def run(times: int, seed: int, scratch: Path) -> outcome.Outcome:
    """Tamper `times` times."""
    rng, result = random.Random(seed), outcome.Outcome()
    recipe, out = exports.recipe_in(scratch), scratch / "out"
    forked.prepare()
    code = forked.start(recipe, out, scratch, scratch / "said").wait()
    if code:
        result.count("export", f"exit {code}: {(scratch / 'said').read_text('utf-8', 'replace')[-500:]}")
        return result
    key = signature.new_key(scratch / "release.key")
    stages.sign(out / "artifact", key)
    public = Path(f"{key}.pub")
    stages.verify(out / "artifact", public)
    records = [json.loads(path.read_text())["measurements"] for path in sorted((out / "checks").glob("*.json"))]
    for number in outcome.in_time(range(times)):
        what = ("bit flipped", "manifest edited and hashed again", "record edited")[max(0, number % 7 - 4)]
        try:
            if what == "record edited":
                problem = _record(rng, scratch / "records", rng.choice(records))
            else:
                edit = _flip if what == "bit flipped" else _edit
                problem = _tampered(rng, out / "artifact", scratch / "copy", public, edit)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        result.count(what, f"number {number}: {problem}" if problem else None)
    return result


def _tampered(rng: random.Random, artifact: Path, copy: Path, key: Path, edit: Any) -> str | None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(artifact, copy)
    what = edit(rng, copy)
    try:
        stages.verify(copy, key)
    except IntegrityError:
        return None
    return f"accepted: {what}"


def _flip(rng: random.Random, copy: Path) -> str:
    path = rng.choice([path for path in sorted(copy.rglob("*")) if path.is_file() and path.stat().st_size])
    content = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} in {path.relative_to(copy)}"


def _edit(rng: random.Random, copy: Path) -> str:
    path = copy / stages.MANIFEST
    before = path.read_bytes()
    while path.read_bytes() == before:
        fields = json.loads(before)
        name = rng.choice(("spec", "gates", "recipe", "passes", "precision", "files", "environment"))
        fields[name] = fuzzing.data(rng, fields[name])
        try:
            path.write_text(stages.Manifest.model_validate(fields).sealed().text(), "utf-8")
        except (ValueError, TypeError):
            path.write_text(json.dumps(fields, default=str, indent=2), "utf-8")
    return f"{name} of the manifest"


def _record(rng: random.Random, folder: Path, text: str) -> str | None:
    """Write a record, damage it, and see that it is not read."""
    shutil.rmtree(folder, ignore_errors=True)
    records = Records(folder, ["campaign"])
    records.write(["stage", None], StageMeasurements.model_validate_json(text))
    if records.read(["stage", None]) is None:
        return "a record that nobody touched is not read"
    (path,) = folder.glob("*.json")
    content = path.read_bytes()
    if rng.random() < 0.5:
        changed = fuzzing.text(rng, content.decode(), text).encode("utf-8", "replace")
    else:
        digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
        at = rng.choice(digits)
        changed = content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :]
    path.write_bytes(changed)
    read = records.read(["stage", None])
    return "a changed record is read" if read is not None and changed.strip() != content.strip() else None


if __name__ == "__main__":
    sys.exit(outcome.main("tampering", __doc__ or "", run, 700))
