"""The hash of a pass's sources changes with every file that the pass imports, and with no other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import bertopt
from bertopt.stages import source_hash


def test_an_edit_of_anything_that_a_pass_imports_is_another_source(tmp_path: Path) -> None:
    """Of bertopt's modules and of the user's, also where they are imported inside a function; not of what is installed."""
    own = tmp_path / "own_pass.py"
    own.write_text("import os, torch\nfrom own_helper import scale\ndef late():\n    from own_pack import inner\n")
    (tmp_path / "own_helper.py").write_text("scale = 1\n")
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack" / "__init__.py").write_text("")
    (tmp_path / "own_pack" / "inner.py").write_text("from . import deeper\n")
    (tmp_path / "own_pack" / "deeper.py").write_text("depth = 1\n")
    (tmp_path / "unrelated.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        seen = [source_hash.of_files([own])]
        for file, text in (("own_helper.py", "scale = 2\n"), ("own_pack/deeper.py", "depth = 2\n"), ("own_pass.py", "import os\n")):
            (tmp_path / file).write_text(text)
            os.utime(tmp_path / file, ns=(len(seen), len(seen)))
            seen.append(source_hash.of_files([own]))
        (tmp_path / "unrelated.py").write_text("more = 1\n")
        assert source_hash.of_files([own]) == seen[-1]
    assert len(set(seen)) == len(seen)


def test_what_another_environment_installed_is_not_followed(tmp_path: Path) -> None:
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "heavy_library.py").write_text("size = 1\n")
    (tmp_path / "own.py").write_text("import heavy_library\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(installed)
        before = source_hash.of_files([tmp_path / "own.py"])
        (installed / "heavy_library.py").write_text("size = 2\n")
        os.utime(installed / "heavy_library.py", ns=(2, 2))
        assert source_hash.of_files([tmp_path / "own.py"]) == before


@pytest.mark.parametrize(
    ("of", "helper"),
    [
        ("passes/quantize_int8.py", "quantization/qdq.py"), ("passes/convert_openvino.py", "quantization/openvino_ptq.py"),
        ("passes/quantize_int8.py", "quantization/calibration_inputs.py"), ("passes/keep_cls_only.py", "modeling/encoder_layers.py"),
        ("modeling/checkpoint.py", "modeling/network.py"),
    ],
)  # fmt: skip
def test_bertopts_own_helpers_are_part_of_a_key(of: str, helper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(bertopt.__file__).parent
    shutil.copytree(package, tmp_path / "bertopt", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(source_hash, "_PACKAGE", tmp_path / "bertopt")
    before = source_hash.of_package(of)
    with (tmp_path / "bertopt" / helper).open("a") as file:
        file.write("\n# edited\n")
    assert source_hash.of_package(of) != before
