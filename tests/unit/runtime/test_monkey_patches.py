"""What users' code has put in place of libraries' functions."""

from __future__ import annotations

import json.encoder
from pathlib import Path
from typing import Any

import pytest

from bertopt.runtime import monkey_patches, task_outputs, tokenization


def test_nothing_is_replaced_at_first() -> None:
    assert monkey_patches.found() == []


def test_functions_methods_and_classes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        pass

    monkeypatch.setattr(task_outputs, "classify", lambda *given: [])
    monkeypatch.setattr(tokenization.Tokenizer, "flat", lambda self, texts: texts)
    monkeypatch.setattr(tokenization.Tokenizer, "whole", property(lambda self: None))
    monkeypatch.setattr(json.encoder, "JSONEncoder", Other)
    assert monkey_patches.found() == [
        "bertopt.runtime.task_outputs.classify", "bertopt.runtime.tokenization.Tokenizer.flat",
        "bertopt.runtime.tokenization.Tokenizer.whole", "json.encoder.JSONEncoder",
    ]  # fmt: skip


def test_what_libraries_replace_in_each_other_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_outputs, "classify", Path.exists)
    monkeypatch.setattr(task_outputs, "span", eval("lambda *given: None"))
    assert monkey_patches.found() == []


def test_a_users_own_classes_are_theirs() -> None:
    class Own(tokenization.Tokenizer):
        def encode(self, texts: Any) -> Any:
            return []

    assert Own and monkey_patches.found() == []
