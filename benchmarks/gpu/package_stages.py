"""Part `smoke`, case `package`: a package in a process that says how far it came, so that a crash names what crashed.

    python -X faulthandler -m benchmarks.gpu.package_stages VARIANT DEVICE FOLDER
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Setting, need, on

_HALF = ("cast_half", {"dtype": "bfloat16"})
#: From the fewest parts to what recipes package: `eager` has matrix products and Triton's kernels only, `math` torch's attention spelled out.
VARIANTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sdpa": [("use_sdpa", {}), _HALF], "unpadded": [("merge_qkv", {}), _HALF, ("pack_sequences", {"attention": "varlen"})],
    "eager": [_HALF], "math": [("use_sdpa", {"backend": "math"}), _HALF], "float32": [("use_sdpa", {})],
}  # fmt: skip
#: Those that are tried in any case; the others, where one of these ends with an error, show what it hangs on.
WANTED = ("sdpa", "unpadded")
STAGES = ("build", "export", "load", "run", "again", "another thread", "two at once", "close", "end")
_STAGE, _FATAL, _TIMEOUT_S = "stage ", "Fatal Python error: ", 150


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    """A row for each variant: the last stage that it began, its exit code (negative for a signal), and where the process was."""
    need("transformers", "pydantic", "tokenizers")
    on(setting.device)
    failed = False
    for variant in VARIANTS:
        if variant in setting.done or not (variant in WANTED or failed) or (variant == "unpadded" and setting.device == "cpu"):
            continue
        row = _run(variant, setting.device)
        failed |= row["exit_code"] != 0
        yield row


def _run(variant: str, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "faulthandler", "-m", __name__, variant, device, folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            return {"key": variant, "exit_code": None, "failure": f"no end within {_TIMEOUT_S} s: {str(error.stdout)[-300:]}"}
    begun = [line.removeprefix(_STAGE) for line in done.stdout.splitlines() if line.startswith(_STAGE)]
    row: dict[str, Any] = {"key": variant, "exit_code": done.returncode, "stage": begun[-1] if begun else "imports"}
    row |= next((json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")), {})
    if done.returncode:
        # What faulthandler says begins with the innermost call, a traceback ends with it.
        _, fatal, said = done.stderr.rpartition(_FATAL)
        where = f"{fatal}{said}"[:2500] if fatal else done.stderr.strip()[-1500:]
        row["failure"] = f"ended with {done.returncode} in stage '{row['stage']}': {where}"
    return row


def main(variant: str, device: str, folder: Path) -> None:
    import numpy as np

    from benchmarks.gpu import models
    from bertopt.core import Context
    from bertopt.passes import PackageAot

    def stage(name: str) -> None:
        assert name in STAGES
        print(f"{_STAGE}{name}", flush=True)

    stage("build")
    reference = models.eager("tiny", folder, device)
    model = models.apply(reference, VARIANTS[variant], Setting(device, True, folder), folder)
    expected = models.open_model(reference, device).run(models.batch(4, 16, ragged=True))["sentence_embedding"]
    stage("export")
    (folder / "package").mkdir()
    package = PackageAot()(model, Context(folder / "package", device)).model  # type: ignore[arg-type]
    stage("load")
    session = models.open_model(package, device)
    stage("run")
    answers = session.run(models.batch(4, 16, ragged=True))["sentence_embedding"]
    stage("again")
    for rows, tokens in ((1, 1), (2, 13), (3, 40), (4, 16)):
        session.run(models.batch(rows, tokens, ragged=True))
    stage("another thread")
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(session.run, models.batch(4, 16, ragged=True)).result()["sentence_embedding"]
        np.testing.assert_allclose(other, answers, atol=1e-3)
        stage("two at once")
        list(pool.map(session.run, [models.batch(4, tokens, ragged=True) for tokens in (16, 24, 33, 40)]))
    print(json.dumps(models.parity(answers, expected)))
    stage("close")
    del session
    stage("end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
