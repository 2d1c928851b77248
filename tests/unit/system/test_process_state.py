"""What a process has been told by its environment, or by a user's code, before it opens an artefact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertopt.errors import Unsupported
from bertopt.modeling import source
from bertopt.system import environment
from bertopt.workers.client import Workers
from tests.support.artefacts import Form, write_artefact
from tests.support.tiny_models import Tiny

ROOT = Path(__file__).parents[3]


def run(code: str, artefact: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter with these variables, with `artefact` as its argument."""
    path = [str(ROOT), *(p for p in sys.path if p)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "2", **environment}
    return subprocess.run([sys.executable, "-c", code, str(artefact)], capture_output=True, text=True, env=variables, check=False, timeout=300)


LOAD = """
import sys, bertopt
try:
    bertopt.load(sys.argv[1])
except bertopt.BertoptError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_without_docstrings(tiny: Tiny, tmp_path: Path) -> None:
    """An intact artefact was said to be damaged: transformers builds docstrings when its models are imported."""
    done = run(LOAD, write_artefact(tiny(), tmp_path / "artefact", "eager"), PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        4, ["transformers cannot import its models without their docstrings, which python -OO drops; unset PYTHONOPTIMIZE, or leave out -OO"],
    )  # fmt: skip
    assert not run(LOAD, write_artefact(tiny(), tmp_path / "onnx"), PYTHONOPTIMIZE="2").returncode


@pytest.mark.parametrize("name", ["HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"])
def test_seconds_of_the_hub_that_are_no_whole_number(name: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports the hub's client, which imports with a ValueError: an intact artefact was said to be damaged, and runs ended as by a bug."""
    message = f"{name} must be a whole number of seconds, or huggingface_hub cannot be imported; got '0.5': change or unset it"
    done = run(LOAD, write_artefact(tiny(), tmp_path / "artefact", "eager"), **{name: "0.5"})
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (4, [message])
    monkeypatch.setenv(name, "0.5")
    for look in (source.resolve, source.examine_here):
        with pytest.raises(Unsupported, match=f"{name} must be a whole number"):
            look("nobody/nothing")
    # Workers import transformers ahead, whether or not they need it.
    monkeypatch.setattr(environment, "check_hub_variables", lambda: None)
    with Workers() as workers, workers.start() as worker:
        assert worker.call("device")


@pytest.mark.parametrize("form", ["eager", "openvino", "onnx"])
def test_threads_that_load_the_first_artefacts_at_once(form: Form, tiny: Tiny, tmp_path: Path) -> None:
    """Libraries cannot be imported by several threads at once: an intact artefact was said to be damaged, or transformers lacked a name."""
    if form != "eager":
        pytest.importorskip("onnxruntime" if form == "onnx" else form)
    code = """
import os, sys, bertopt
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-5)
before = dict(os.environ)
with ThreadPoolExecutor(4) as pool:
    answers = list(pool.map(lambda _: bertopt.load(sys.argv[1])(["a cat"]), range(4)))
assert all(answer == answers[0] for answer in answers), answers
assert {name for name in os.environ if name not in before} <= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}, os.environ
"""
    done = run(code, write_artefact(tiny(), tmp_path / "artefact", form))
    assert not done.returncode, done.stderr


def test_in_a_sub_interpreter(tiny: Tiny, tmp_path: Path) -> None:
    """mod_wsgi starts one for each application: the first call of a predictor never ended, as extension modules wait there for the main one's lock."""
    # Not isolated, as Python makes them by default and refuses most extension modules there itself: mod_wsgi's are not.
    interpreters, kind = ("_xxsubinterpreters", "isolated=False") if sys.version_info < (3, 13) else ("_interpreters", "'legacy'")
    code = f"""
import sys, {interpreters} as interpreters
code = "import sys; sys.path[:0], sys.argv[:] = " + repr((sys.path, sys.argv)) + chr(10) + {LOAD!r}
try:
    failed = interpreters.run_string(interpreters.create({kind}), code)
except BaseException as error:
    failed = error
print(failed, file=sys.stderr)
"""
    done = run(code, write_artefact(tiny(), tmp_path / "artefact"))
    assert (
        "an artefact cannot be opened in a sub-interpreter, where its libraries wait for ever; open it in the main one: with mod_wsgi, set "
        "WSGIApplicationGroup %{GLOBAL}"
    ) in done.stderr


def test_code_in_the_current_directory_is_not_run(tmp_path: Path) -> None:
    """`bertopt`, as pip installs it, does not look for modules there. Its workers did, and doctor's trial imports."""
    for name in ("random", "numpy", "bertopt"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('run from the current directory')\n")
    code = """
from bertopt.system import machine
from bertopt.workers.client import Workers
with Workers() as workers, workers.start() as worker:
    print(worker.call("device")["gpu"])
print(machine._broken(["random", "numpy"]))
"""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=variables, check=False, timeout=300)
    assert not done.returncode and done.stdout.splitlines()[-1] == "{}", done.stdout + done.stderr


def test_modules_beside_a_users_program_are_found_by_workers(tmp_path: Path) -> None:
    """`python -m` and `python -c` look in the current directory."""
    (tmp_path / "ops_of_mine.py").write_text("class Ops:\n    def __call__(self, message, arrays):\n        return 'mine', {}\n")
    code = "from bertopt.workers.client import Workers\nwith Workers() as workers, workers.start('ops_of_mine') as worker:\n    print(worker.call('x'))"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=variables, check=False, timeout=300)
    assert done.stdout.strip() == "mine", done.stderr
