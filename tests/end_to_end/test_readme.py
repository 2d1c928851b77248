"""README and docs say what the result files, the command line and the code say."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from benchmarks.campaign_tables import FORMS, matrix, support, verdicts
from benchmarks.readme import PAGES, branch, layers, pages, serve_campaign, updated
from bertopt.cli import app
from bertopt.recipe import load
from bertopt.recipe.schema import recipe_schema
from bertopt.results import Delivered, Report, Stage

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
#: Every hand-written page.
WRITTEN = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
           *sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "docs" / "passes" / "index.md"]  # fmt: skip
TEXTS = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in WRITTEN}
by_page = pytest.mark.parametrize("page", TEXTS)


def code(text: str) -> Iterator[str]:
    """Every line of a code block and every code span, comments left out."""
    for block in re.findall(r"```(?:\w*)\n(.*?)```", text, re.S):
        yield from block.splitlines()
    rest = re.sub(r"```.*?```", "", text, flags=re.S)
    yield from (line for line in rest.splitlines() if line.startswith("    "))
    for span in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", rest, flags=re.M)):
        yield span.replace("\n", " ")


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `bertopt …` in code, the program's name left out."""
    for line in code(text):
        found = re.search(r"(?:^|[\s$])(?:python -m )?bertopt (?=[a-z-])(.*)", line)
        if found and "import" not in line:
            yield shlex.split(found[1].split("#")[0].replace("'", ""))


def test_tables_are_generated_from_the_result_files() -> None:
    for page, text in pages().items():
        assert text == page.read_text("utf-8"), f"{page.name} is stale; run python -m benchmarks.readme"


@by_page
def test_every_table_has_a_writer(page: str) -> None:
    for name in re.findall(r"<!-- (\w+): begin -->", TEXTS[page]):
        if name != "transcript":
            text = f"<!-- {name}: begin -->\nstale\n<!-- {name}: end -->"
            assert "stale" not in updated(text), name


def test_readme_is_short_and_begins_with_what_to_type() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:40])
    for answer in ("takes a BERT-family checkpoint", "**For you**", "**Not for you**", "pip install", "bertopt optimize", "`artifact/`"):
        assert answer in first


@by_page
def test_commands_and_options_exist(page: str) -> None:
    verbs: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wrong = set()
    for verb, *words in commands(TEXTS[page]):
        given = {word.strip("[]…").split("=")[0] for word in words if word.startswith(("-", "[-"))}
        if verb in verbs:
            command = verbs[verb]
            if words and words[0] in getattr(command, "commands", ()):
                command = command.commands[words[0]]
            known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
            wrong |= {f"bertopt {verb} {option}" for option in given - known}
        elif not verb.startswith("-"):
            wrong.add(f"bertopt {verb}")
    assert not wrong


@by_page
def test_modules_that_are_run_exist(page: str) -> None:
    for name in re.findall(r"python -m ([\w.]+)", TEXTS[page]):
        assert importlib.util.find_spec(name), name


@by_page
def test_recipes_are_valid(page: str, tmp_path: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", TEXTS[page], re.S):
        if "schema_version" in block:
            (tmp_path / "mine.jsonl").write_text('{"text": "a", "label": "b"}\n')
            (tmp_path / "recipe.yaml").write_text(block)
            assert load(tmp_path / "recipe.yaml").deliver == "fastest"


def test_the_recipe_page_has_every_key() -> None:
    text = TEXTS["docs/recipes.md"]
    schema = recipe_schema()
    keys = set(schema["properties"]) - {"inputs"}
    assert not [key for key in keys if f"| `{key}` |" not in text]


@by_page
def test_python_blocks_compile(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        compile(block, page, "exec")


@by_page
def test_files_that_are_linked_exist(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", TEXTS[page]):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_new_module_paths_exist() -> None:
    rows = re.findall(r"^\| `(bertopt\.[\w.]+)` \| `(bertopt\.[\w.]+)` \|$", TEXTS["docs/architecture.md"], re.M)
    assert len(rows) > 50
    assert not [new for _, new in rows if importlib.util.find_spec(new) is None]


def test_layers_are_described() -> None:
    text = TEXTS["docs/architecture.md"]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, re.M))))
    folders = {path.name for path in (ROOT / "bertopt").iterdir() if (path / "__init__.py").exists()}
    assert folders <= named, folders - named


@by_page
def test_plain_words(page: str) -> None:
    written = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", TEXTS[page], flags=re.S)
    strange = r"meanwhile|withheld|so many|of its own|(?:is|are) (?:told|asked) (?:of|to|the)|per side|processes a side|its company"
    assert not re.findall(rf"\b(?:{strange})\b", written, re.I)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """docs/generate_passes.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate_passes", ROOT / "docs" / "generate_passes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_pass_s_page_has_every_option(generator: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "index.md").write_text("kept")
    (tmp_path / "gone_pass.md").write_text("of a pass that is no more")
    generator.write(tmp_path)
    classes = generator.built_in()
    assert {path.stem for path in tmp_path.glob("*.md")} == {"index", *(cls.name() for cls in classes)}
    for cls in classes:
        text = (tmp_path / f"{cls.name()}.md").read_text("utf-8")
        fields = cls.model_json_schema().get("properties", {})
        options = [name for name, field in fields.items() if not field.get("deprecated")]
        assert text.startswith(f"# {cls.name()}\n") and not [name for name in options if f"| `{name}` |" not in text]


def cell(family: str, pass_: str, task: str, outcome: str) -> dict[str, str]:
    return {"family": family, "pass_": pass_, "task": task, "outcome": outcome}


def test_the_matrix_table_counts_tasks_and_gathers_reasons() -> None:
    no = "unsupported: MPNetForTokens has no SDPA; leave it out\nand more"
    cells = [
        cell("bert", "use_sdpa", "tags", "ok"), cell("bert", "use_sdpa", "spans", "ok"),
        cell("bert", "build", "tags", "built (needs GPU)"), cell("bert", "build", "spans", "ok"),
        cell("mpnet", "use_sdpa", "tags", no), cell("mpnet", "use_sdpa", "spans", no.replace("Tokens", "Spans")),
        cell("mpnet", "build", "tags", "ok"), cell("mpnet", "build", "spans", no),
    ]  # fmt: skip
    table = matrix({"cells": cells}).splitlines()
    assert table[0] == "| | `use_sdpa` | `build` |"
    assert table[2:4] == [
        "| bert | ok | built (needs GPU) 1/2, ok 1/2 |",
        "| mpnet | unsupported | ok 1/2, unsupported 1/2 |",
    ]
    assert "- `use_sdpa`, mpnet: … has no SDPA; leave it out" in table
    for broken in (cells[:-1], [*cells[:-1], cells[-1] | {"outcome": "FAILED: x"}]):
        with pytest.raises(ValueError, match="1 cells failed or are missing, first mpnet · build · spans"):
            matrix({"cells": broken})


def test_readme_shows_the_branch_that_is_delivered() -> None:
    steps = {"reference": None, "a": "reference", "b": "a", "other": "a", "c": "b"}
    stages = [Stage(index=i, name=name, after=after, status="ok") for i, (name, after) in enumerate(steps.items())]
    packages = dict.fromkeys(("torch", "transformers", "onnxruntime"), "1")
    environment = {"packages": packages, "cores": 2, "cpu": "c", "isa": []}
    report = Report(bertopt_version="0", recipe={}, environment=environment, model={}, stages=stages,
                    delivered=Delivered(stage="b", path="artifact"))  # fmt: skip
    assert re.findall(r"`(\w+)`", branch(report)) == ["reference", "a", "b"]


def test_support_names_the_tasks_that_a_form_does_not_have() -> None:
    outcomes = dict.fromkeys(FORMS.values(), ("ok", "ok")) | {"pack_sequences": ("unsupported: x", "unsupported: x"),
                                                              "quantize_int8": ("ok", "unsupported: x")}  # fmt: skip
    cells = [cell("bert", name, task, told[i]) for name, told in outcomes.items() for i, task in enumerate(("a", "b"))]
    assert support({"cells": cells}).splitlines()[2:] == ["| bert | yes | yes | yes | no | yes | all but b | yes | yes |"]


def test_aa_races_are_counted_by_shape_and_verdict() -> None:
    verdict = {"aa": ("NO DIFFERENCE", "SLOWER"), "slow": ("SLOWER", "SLOWER")}
    rows = [{"kind": kind, "shape": "1 x 16", "verdict": told, "warning": "CPU steal of 9 %" if kind == "aa" else None}
            for kind, both in verdict.items() for told in both]  # fmt: skip
    settings = {"slow_down": 0.05, "model": "m > use_sdpa", "shape_budget_s": 2.5, "rule": {"dead_band": 0.02}}
    text = verdicts({"rows": rows, "settings": settings, "environment": {"cores": 2, "cpu": "c", "isa": ["avx2"]}})
    assert "| a model against itself | 1×16 | 2 | 0 | 1 | 1 | 0 |" in text
    assert "| against itself, simulated 5% slower | 1×16 | 2 | 0 | 2 | 0 | 0 |" in text
    assert "dead band ±2%, 2 cores of c (avx2); 2 of 4 races saw CPU steal" in text


def test_layers_are_drawn_from_the_top_down() -> None:
    contracts = [{"type": "independence"}, {"type": "layers", "layers": ["cli", "core | system"]}]
    lines = layers({"tool": {"importlinter": {"contracts": contracts}}}).splitlines()
    assert [line.strip("|").strip() for line in lines if line.startswith("|")] == ["cli", "core | system"]


def test_the_api_page_has_every_public_name() -> None:
    import bertopt

    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert [name for name in bertopt.__all__ if name != "__version__" and f":: bertopt.{name}" not in page] == []


def test_what_became_of_requests_under_load_is_counted() -> None:
    part = {"requests": 2000, "outcomes": {"right": 1999, "abandoned": 1}, "cache_mb": 0, "memory_growth": 0.014, "holds": True}
    table = serve_campaign({
        "requests": part, "requests_cached": {**part, "cache_mb": 0.25, "holds": False},
        "restarts": {"restarts": 3, "accepted": 9, "lost": 0, "wrong": 0, "holds": True}, "kills": {"kills": 2, "ready_s": [0.5, 0.7], "holds": True},
        "overload": {"seconds": 60, "outcomes": {"right": 5}, "accepted_p99_s": 1.5, "limit_s": 1.0, "holds": True},
    })  # fmt: skip
    assert "| 2,000 requests, cache off | 1,999 right, 1 abandoned; memory grew by 1.4% | yes |" in table
    assert "cache on | 1,999 right, 1 abandoned; memory grew by 1.4% | no |" in table
    assert "| 2 kills by SIGKILL under load | ready again in at most 0.70 s | yes |" in table
