"""The arrows between bertopt's modules, and rules that hold for every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "bertopt"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "tensorrt")

#: What may import what, inner layers first. A module may import from its own group and from those listed, nothing
#: else; imports for annotations alone count too. `bertopt` itself is the package's version and lazy names.
ALLOWED: dict[str, str] = {
    "errors": "",
    "environment": "errors",
    "profile": "",
    "spec": "",
    "core": "errors profile spec",
    "packing": "core spec",
    "results": "report",  # inside two functions: how a Report shows itself in Jupyter
    "wire": "core",
    "clock": "core",
    "processes": "",
    "source": "errors",
    # Checkpoints to models.
    "layers": "errors",
    "layouts": "core",
    "network": "core layers layouts",
    "tokenizer": "errors source",
    "checkpoint": "core errors network source tokenizer",
    # core <- {passes, sessions, checks}
    "vendor": "errors",
    "calibration": "core packing",
    "int8": "calibration core errors",
    "passes": "calibration core errors int8 layers vendor",
    "sessions": "core errors packing vendor",
    "checks": "core errors results",
    # Recipes.
    "yaml_reader": "errors",
    "wording": "errors yaml_reader",
    "tree": "core errors passes wording yaml_reader",
    "waivers": "results wording yaml_reader",
    "recipe": "core errors passes results tree waivers wording yaml_reader",
    "schema": "core passes recipe tree",
    "texts": "core errors",
    # Stages, and what opens them.
    "stage": "bertopt checkpoint core environment errors passes source",
    "artifact": "errors results stage",
    "runtime": "core environment errors packing sessions stage",
    # Workers: the child's side, then ours.
    "effects": "core passes",
    "fingerprint": "core",
    "ops": "checkpoint clock core debug effects environment errors fingerprint packing passes runtime sessions stage",
    "child": "checkpoint errors ops passes processes runtime wire",
    "worker": "core errors passes processes wire",
    # {passes, sessions, checks} <- pipeline <- report <- cli
    "store": "artifact core errors recipe results source stage texts worker",
    "race": "checks core results runtime worker",
    "records": "results",
    "examine": "checks core errors race records results runtime texts worker",
    "judge": "results",
    "pipeline": "artifact bertopt checks core environment errors examine judge race recipe results stage store texts tree worker",
    "debug": "checks core errors passes pipeline recipe results runtime sessions stage store texts worker yaml_reader",
    "verify": "bertopt checks core environment errors judge pair results stage store texts worker",
    "pair": "core errors examine race results stage texts worker",
    "bench": "checks core environment errors pair race results stage texts worker",
    "diff": "checks results",
    "compare": "checks diff errors pair results stage texts worker",
    "report": "diff errors results",
    "export": "cli errors pipeline recipe report results",
    "cli": "bench bertopt compare debug diff environment errors export passes recipe report results schema stage verify",
    "bertopt": "core errors export passes results runtime",
}


def group(module: str) -> str:
    """`bertopt.passes.use_sdpa` is in group `passes`."""
    return module.split(".")[1] if "." in module else module


def module_name(file: Path) -> str:
    parts = [*file.relative_to(PACKAGE.parent).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file) for file in FILES}


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that `file` imports anywhere, and the line."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module, node.lineno


def own(file: Path) -> Iterator[tuple[str, int]]:
    return ((name, line) for name, line in imported(file) if name.split(".")[0] == "bertopt")


def ids(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_arrows(file: Path) -> None:
    mine = group(module_name(file))
    assert mine in ALLOWED, f"{mine} is new: say in ALLOWED what it may import"
    allowed = {mine, *ALLOWED[mine].split()}
    wrong = [
        f"{file.name}:{line}: {mine} may not import {name}" for name, line in own(file) if group(name) not in allowed
    ]
    assert not wrong


def test_the_groups_form_no_circle() -> None:
    # Three exceptions, all inside functions: the package's lazy names, `python -m bertopt.export`, which is the cli's, and
    # how a Report shows itself in Jupyter, which asks the object.
    edges = {name: set(to.split()) - {"bertopt"} for name, to in ALLOWED.items() if name != "bertopt"}
    edges["export"] -= {"cli"}
    edges["results"] -= {"report"}
    while edges:
        free = [name for name, to in edges.items() if not to & set(edges)]
        assert free, f"a circle among {', '.join(edges)}"
        for name in free:
            del edges[name]


def test_every_allowed_edge_is_used() -> None:
    used = {(group(module_name(file)), group(name)) for file in FILES for name, _ in own(file)}
    stale = [f"{name} -> {to}" for name, targets in ALLOWED.items() for to in targets.split() if (name, to) not in used]
    assert not [edge for edge in stale if not edge.endswith("-> errors")]


@pytest.mark.parametrize("file", sorted((PACKAGE / "passes").glob("[a-z]*.py")), ids=ids)
def test_passes_know_only_the_nouns(file: Path) -> None:
    assert {name for name, _ in own(file)} <= {
        "bertopt.core", "bertopt.errors", "bertopt.modeling.encoder_layers", "bertopt.quantization.calibration_inputs", "bertopt.int8.calibration",
        "bertopt.int8.qdq", "bertopt.system.openvino_import",
    }  # fmt: skip


@pytest.mark.parametrize("file", [*(PACKAGE / "checks").glob("*.py"), *(PACKAGE / "sessions").glob("*.py")], ids=ids)
def test_checks_and_sessions_know_no_pass(file: Path) -> None:
    strange = {
        "bertopt.passes",
        "bertopt.runtime",
        "bertopt.sessions" if file.parent.name == "checks" else "bertopt.checks",
    }
    assert not [name for name, _ in own(file) if name in strange or name.rpartition(".")[0] in strange]
    if file.parent.name == "checks":
        assert not {name.split(".")[0] for name, _ in imported(file)} & set(HEAVY)


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_rules_of_every_file(file: Path) -> None:
    text = file.read_text("utf-8")
    assert len(text.splitlines()) <= 300
    assert not [
        name for name, _ in imported(file) if name.split(".")[0] in ("pickle", "cPickle", "dill", "shelve", "joblib")
    ]
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    printing = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not printing or file.parent.name == "cli"


@pytest.mark.parametrize(
    "statement", ["import bertopt", "import bertopt.recipe", "import bertopt.cli", "import bertopt.pipeline"]
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    script = f"import sys; {statement}; print(*({set(HEAVY)!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert found.stdout.strip() == ""


def test_importing_bertopt_is_almost_nothing() -> None:
    script = "import sys; import bertopt; print(*(name for name in sys.modules if name.startswith('bertopt')))"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    assert found.stdout.split() == ["bertopt"]


@pytest.mark.parametrize("file", FILES, ids=ids)
def test_openvino_is_imported_by_vendor_alone(file: Path) -> None:
    """Imported plainly, it and NNCF phone home."""
    found = {name.split(".")[0] for name, _ in imported(file)} & {"openvino", "nncf"}
    assert not found or file.name == "vendor.py"
