"""Passes by name: who registers them, what is refused, and passes restored from what a stage records."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from bertopt import passes
from bertopt.core import Context, Eager, Model, Onnx, Pass, Result, Rewrite
from bertopt.errors import PassFailed, Unsupported, UsageError
from bertopt.passes import CastHalf, UseSdpa, registry
from bertopt.recipe.parser import from_dict

AnyPass = Pass[Any, Any]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[AnyPass]]:
    """The registry of this test alone."""
    mine = dict(registry._registered)
    monkeypatch.setattr(registry, "_registered", mine)
    return mine


class DropHead(Pass[Eager, Eager]):
    """A pass of somebody else's."""

    keep: int = 1

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return Result(model, {})


def test_register(own_registry: dict[str, type[AnyPass]]) -> None:
    assert passes.get("drop_head") is None
    assert passes.register(DropHead) is DropHead
    assert passes.register(DropHead) is DropHead
    assert passes.get("drop_head") is DropHead
    assert passes.all_passes()["drop_head"] is DropHead
    passes.all_passes().clear()
    assert passes.get("use_sdpa") is UseSdpa


def test_register_refuses_a_name_that_is_taken(own_registry: dict[str, type[AnyPass]]) -> None:
    class UseSdpa(Pass[Eager, Eager]):
        def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
            return Result(model, {})

    with pytest.raises(UsageError, match=r"'use_sdpa' is registered already \(bertopt\.passes\.use_sdpa\.UseSdpa\)"):
        passes.register(UseSdpa)


def test_register_refuses_reserved_options(own_registry: dict[str, type[AnyPass]]) -> None:
    class Late(Pass[Eager, Eager]):
        timeout: int = 3

        def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
            return Result(model, {})

    with pytest.raises(UsageError, match="option 'timeout' is a key of every step"):
        passes.register(Late)


@pytest.mark.parametrize("thing", [int, DropHead(), "use_sdpa", None])
def test_register_refuses_what_is_no_pass(own_registry: dict[str, type[AnyPass]], thing: Any) -> None:
    with pytest.raises(UsageError, match=r"takes a subclass of bertopt\.Pass"):
        passes.register(thing)


def test_register_wants_forms(own_registry: dict[str, type[AnyPass]]) -> None:
    class Formless(Pass):  # type: ignore[type-arg]
        def __call__(self, model: Any, ctx: Context) -> Any:
            return Result(model, {})

    with pytest.raises((UsageError, TypeError), match=r"must name its forms: class Formless\(Pass\[Eager, Onnx\]\)"):
        passes.register(Formless)


def test_register_says_what_a_class_lacks(own_registry: dict[str, type[AnyPass]]) -> None:
    """Each was registered, and ended in a traceback, or as a bug of bertopt, where a recipe used it."""

    class Silent(Pass[Onnx, Onnx]):
        keep: int = 1

    class Started(DropHead):
        def __init__(self, keep: int) -> None:
            super().__init__(keep=keep)

    for cls, words in (
        (Silent, r"'silent' .* must define __call__\(self, model, ctx\)"),
        (Started, "'started' .* must define no __init__: its options are fields"),
    ):
        with pytest.raises(UsageError, match=words):
            passes.register(cls)
    assert not own_registry.keys() & {"silent", "started"}


class Rounds(DropHead):
    """Says what its INT8 products do, in words."""

    def int8_rounding(self) -> Any:
        return {"scales": "token"}

    def half_rounding(self) -> Any:
        return ["products"]

    def conflict(self, before: Any) -> str | None:
        raise KeyError("no such step")


def test_what_a_pass_says_of_itself_is_its_own_fault(own_registry: dict[str, type[AnyPass]]) -> None:
    """These ended as bugs in bertopt."""
    assert registry.int8_rounding(DropHead()) is None and registry.int8_rounding(passes.BuildNative()) is not None
    with pytest.raises(PassFailed, match=r"'rounds' must return a bertopt\.core\.Int8Rounding or None from int8_rounding; got dict"):
        registry.int8_rounding(Rounds())
    assert registry.half_rounding(DropHead()) == "operators" and registry.half_rounding(passes.BuildNative()) == "layer_products"
    with pytest.raises(PassFailed, match=r"'rounds' must return 'operators', 'layer_products' from half_rounding; got \['products'\]"):
        registry.half_rounding(Rounds())
    passes.register(Rounds)
    recipe = {"schema_version": 1, "model": "m", "steps": [{"pass": "use_sdpa"}, {"pass": "rounds"}]}
    with pytest.raises(PassFailed, match="'rounds', which is not part of bertopt, raised KeyError: 'no such step'"):
        from_dict(recipe)


def test_a_pass_without_rewrite_says_what_it_lacks() -> None:
    with pytest.raises(PassFailed, match=r"'drop_head' must define rewrite\(self, network\), which changes the network in place"):
        DropHead().rewrite(torch.nn.Identity())


def test_an_error_of_a_pass_says_whose_it_is_and_where() -> None:
    words = rf"'drop_head', which is not part of bertopt, raised KeyError: 'a' \({__file__}:\d+, in "
    with pytest.raises(PassFailed, match=words) as caught, registry.at_work(DropHead()):
        {}["a"]
    assert caught.value.exit_code == 3 and isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(KeyError), registry.at_work(passes.UseSdpa()):
        {}["a"]
    with pytest.raises(PassFailed, match="raised SystemExit: no such layer"), registry.at_work(DropHead()):
        sys.exit("no such layer")
    with pytest.raises(Unsupported, match="no such heads"), registry.at_work(DropHead()):
        raise Unsupported("no such heads")


def test_a_package_whose_pass_cannot_be_imported_is_named(own_registry: dict[str, type[AnyPass]], monkeypatch: pytest.MonkeyPatch) -> None:
    """`bertopt passes`, and every recipe with an unknown pass, ended as a bug in bertopt, with a traceback."""
    point = EntryPoint("gone", "no_such_module:Gone", registry.ENTRY_POINTS)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    assert registry.get("use_sdpa") is passes.UseSdpa
    with pytest.raises(UsageError, match=r"'gone' \(no_such_module:Gone\), which an installed package offers, cannot be imported: ModuleNotFoundError: .*uninstall it"):
        registry.get("fold_scaling")


def test_installed_packages_offer_passes(own_registry: dict[str, type[AnyPass]], monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("drop_head", f"{__name__}:DropHead", registry.ENTRY_POINTS)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [point] if group == registry.ENTRY_POINTS else []
    )
    found = passes.get("drop_head")
    assert found is not None
    assert found.name() == "drop_head"
    assert passes.get("drop_tail") is None


def test_a_stage_cannot_have_a_module_imported(own_registry: dict[str, type[AnyPass]]) -> None:
    with pytest.raises(UsageError, match="pass 'antigravity' is not registered here"):
        passes.require("antigravity")
    assert "antigravity" not in sys.modules


def test_workers_import_what_was_registered_by_hand(own_registry: dict[str, type[AnyPass]], tmp_path: Path) -> None:
    passes.register(DropHead)
    offered = registry.importable_passes()
    assert offered["drop_head"][:2] == (__name__, "DropHead")
    script = tmp_path / "script.py"
    script.write_text(
        "from bertopt import Eager, Pass\n"
        "class FromScript(Pass[Eager, Eager]):\n"
        "    def __call__(self, model, ctx): ...\n"
        "assert __name__ != '__main__'\n"
    )
    registry.add_importable({"from_script": ("__main__", "FromScript", str(script)), "typed": ("__main__", "Typed", None)})
    assert passes.require("from_script").name() == "from_script"
    with pytest.raises(UsageError, match="put it in a file"):
        passes.require("typed")


def test_every_built_in_pass_states_its_forms_and_documents_its_options() -> None:
    for name in ("use_sdpa", "use_better_transformer", "cast_half", "compile_torch", "export_onnx", "fuse_ort",
                 "cast_onnx_half", "quantize_int8", "build_tensorrt"):  # fmt: skip
        cls = passes.all_passes()[name]
        assert cls.name() == name
        assert all(issubclass(form, Model) for form in cls.forms())
        assert cls.__doc__
        assert all(option.description for option in cls.model_fields.values())
        assert passes.get(name)() == cls.model_validate(cls().record().options)


class NeedsPlain(Pass[Eager, Eager]):
    """A pass of somebody else's that declares what it cannot follow."""

    incompatible_with: ClassVar[dict[str, str]] = {"cast_half": "needs float32 weights; put it before cast_half"}

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return Result(model, {})


def test_any_pass_may_declare_what_it_cannot_follow() -> None:
    assert NeedsPlain().conflict([UseSdpa(), CastHalf()]) == "needs float32 weights; put it before cast_half"
    assert NeedsPlain().conflict([UseSdpa()]) is None
    assert "incompatible_with" not in NeedsPlain.model_fields


def test_what_passes_declare_names_passes() -> None:
    for cls in passes.all_passes().values():
        assert set(cls.incompatible_with) <= set(passes.all_passes()), cls
        assert all(len(reason) > 20 for reason in cls.incompatible_with.values()), cls


def test_a_record_is_built_once_in_a_process() -> None:
    record = CastHalf(dtype="bfloat16").record()
    first = registry.restore(record)
    assert first == CastHalf(dtype="bfloat16") and registry.restore(record.model_copy()) is first
    assert registry.restore(CastHalf(dtype="float16").record()) != first


def test_a_class_registered_anew_is_not_the_old_one() -> None:
    def make() -> type[Pass[Any, Any]]:
        class Renewed(Pass[Eager, Eager]):
            def __call__(self, model: Any, ctx: Any) -> Any:
                raise NotImplementedError

        return passes.register(Renewed)

    try:
        made = [type(registry.restore(make()().record())) for _ in range(2)]
        assert made[0] is not made[1]
    finally:
        del registry._registered["renewed"]


def test_a_pass_that_is_not_registered_cannot_be_restored() -> None:
    with pytest.raises(UsageError, match="'no_such_pass' is not registered here"):
        registry.restore(Rewrite(name="no_such_pass", options={}))


def test_an_error_of_a_pass_from_an_interactive_session_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook has no file to look the line up in: that was the error which its author read."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(DropHead, "__module__", "__main__")
    with pytest.raises(PassFailed, match=r"'drop_head'.*raised ValueError: wrong layer"), registry.at_work(DropHead()):
        raise ValueError("wrong layer")
