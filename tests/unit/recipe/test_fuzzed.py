"""Whatever a recipe, a texts file or a manifest holds: it is read, or refused with the typed error that was promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertopt import stages
from bertopt.errors import IntegrityError, UsageError
from bertopt.recipe import parser, texts
from campaigns.faults import recipes as fuzzed_recipes
from campaigns.faults import texts as fuzzed_texts
from tests.support.artefacts import write_placeholder
from tests.support.specs import spec

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
given, settings = hypothesis.given, hypothesis.settings

#: The same examples everywhere, however slow the machine; more by hand with --hypothesis-profile or the campaigns.
bounded = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["use_sdpa", "reference", "int8"])
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=8)
KEYS = [*parser.RecipeFields.model_fields, "steps", "pass", "name", "after", "limits", "on_fail", "dtype"]
documents = st.dictionaries(st.sampled_from(KEYS), anything | st.lists(st.dictionaries(st.sampled_from(KEYS), anything, max_size=4)))


@bounded
@given(documents)
def test_plain_data_is_a_recipe_or_refused(data: Any) -> None:
    try:
        parser.from_dict(data)
    except UsageError as error:
        assert str(error).replace("\n", "").isprintable()


@bounded
@given(st.text() | st.builds(lambda head, rest: f"schema_version: 1\nmodel: {head}\nsteps:\n  - {rest}", st.text(), st.text()))
def test_text_is_a_recipe_or_refused(text: str) -> None:
    try:
        parser.parse(text, "r.yaml")
    except UsageError as error:
        assert str(error).replace("\n", "").isprintable()


@bounded
@given(st.binary() | st.text().map(lambda text: json.dumps({"text": text}).encode()), st.sampled_from([".txt", ".jsonl"]))
def test_a_texts_file_is_read_or_refused(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(content)
    try:
        assert all(text.encode() is not None for text in texts.read(path).texts)
    except UsageError as error:
        assert "t." in str(error)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_placeholder(tmp_path / "artifact", spec())


@bounded
@given(st.data())
def test_an_edited_manifest_is_refused(artifact: Path, data: Any) -> None:
    path = artifact / stages.MANIFEST
    good = path.read_bytes()
    try:
        fields = json.loads(good)
        if data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(fields)))
            value = data.draw(anything)
            hypothesis.assume(value != fields[key])
            path.write_text(json.dumps({**fields, key: value}, indent=2, ensure_ascii=True) + "\n")
        else:
            at = data.draw(st.integers(0, len(good) - 1))
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :])
        with pytest.raises(IntegrityError):
            stages.verify(artifact)
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("campaign", [fuzzed_recipes, fuzzed_texts])
def test_the_campaigns_in_short(campaign: Any, tmp_path: Path) -> None:
    outcome = campaign.run(200, 1, tmp_path)
    assert not outcome.problems
    assert sum(outcome.tried.values()) == 200


def test_a_values_control_characters_do_not_reach_the_terminal() -> None:
    with pytest.raises(UsageError) as caught:
        parser.from_dict("\x1b[31m\0")  # type: ignore[arg-type]
    assert r"'\x1b[31m\x00'" in str(caught.value)
