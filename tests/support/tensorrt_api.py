"""What bertopt uses of TensorRT's Python API, and where the real packages have it.

    python -m tests.support.tensorrt_api STUBS_10 BINDINGS_11     folders with the unpacked wheels; writes tensorrt_api.json

`tensorrt-stubs` 10 is read as source. The bindings of 11 are a real extension over three libraries that only NVIDIA's
index has: the ten C functions that it imports are built here as stubs that return nothing, which is enough to look at
its classes. TensorRT-RTX is installed and looked at whenever the tests run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Classes and members that bertopt uses, with the number of arguments it passes (None: no method).
USED: dict[str, dict[str, int | None]] = {
    "Builder": {"create_network": 1, "create_builder_config": 0, "create_optimization_profile": 0, "build_serialized_network": 2},
    "BuilderFlag": {"TF32": None},
    "ICudaEngine": {
        "create_execution_context": 0, "num_io_tensors": None, "get_tensor_name": 1, "get_tensor_mode": 1,
        "create_engine_inspector": 0,
    },
    "EngineInspector": {"get_engine_information": 1},
    "IExecutionContext": {
        "set_optimization_profile_async": 2, "set_input_shape": 2, "set_tensor_address": 2, "get_tensor_shape": 1,
        "execute_async_v3": 1,
    },
    "IBuilderConfig": {
        "builder_optimization_level": None, "profiling_verbosity": None, "clear_flag": 1, "add_optimization_profile": 1,
        "create_timing_cache": 1, "set_timing_cache": 2, "get_timing_cache": 0,
    },
    "ILayer": {"type": None, "get_output": 1},
    "ILogger": {"Severity": None, "log": 2},
    "INetworkDefinition": {
        "num_layers": None, "get_layer": 1, "num_inputs": None, "get_input": 1, "num_outputs": None, "get_output": 1,
        "unmark_output": 1,
    },
    "IOptimizationProfile": {"set_shape": 4},
    "ITensor": {"name": None, "dtype": None},
    "ITimingCache": {"serialize": 0},
    "LayerInformationFormat": {"JSON": None},
    "NetworkDefinitionCreationFlag": {"STRONGLY_TYPED": None},
    "OnnxParser": {"parse_from_file": 1, "num_errors": None, "get_error": 1},
    "ParserError": {"desc": 0, "node_operator": 0, "node_name": 0},
    "ProfilingVerbosity": {"DETAILED": None},
    "Runtime": {"deserialize_cuda_engine": 1, "engine_host_code_allowed": None},
    "TensorIOMode": {"OUTPUT": None},
}  # fmt: skip
#: Of TensorRT-RTX alone; the code asks whether it is there.
RTX_ONLY: dict[str, dict[str, int | None]] = {
    "ComputeCapability": {"CURRENT": None, "SM86": None},
    "CudaGraphStrategy": {"WHOLE_GRAPH_CAPTURE": None},
    "DynamicShapesKernelSpecializationStrategy": {"EAGER": None},
    "IBuilderConfig": {"num_compute_capabilities": None, "set_compute_capability": 2},
    "ICudaEngine": {"create_runtime_config": 0},
    "IRuntimeCache": {"serialize": 0, "deserialize": 1},
    "IRuntimeConfig": {
        "create_runtime_cache": 0, "set_runtime_cache": 1, "dynamic_shapes_kernel_specialization_strategy": None,
        "cuda_graph_strategy": None,
    },
}  # fmt: skip
#: Removed in 11 or never in one of them; bertopt asks before it uses them.
OPTIONAL = {"NetworkDefinitionCreationFlag.STRONGLY_TYPED"}
RECORD = Path(__file__).with_suffix(".json")
_C_FUNCTIONS = {
    "libnvinfer.so.11": ("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
                         "getBuilderPluginRegistry", "getPluginRegistry", "getInferLibVersion"),
    "libnvonnxparser.so.11": ("createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getNvOnnxParserVersion"),
    "libnvinfer_plugin.so.11": ("initLibNvInferPlugins",),
}  # fmt: skip


def of_module(trt: Any) -> dict[str, dict[str, str]]:
    """Return each used class's members: '' for what is no method, else its signatures as its docstring states them."""
    api: dict[str, dict[str, str]] = {}
    for kind, members in _all().items():
        cls = getattr(trt, kind, None)
        for name in members if cls is not None else ():
            member = getattr(cls, name, None)
            if member is not None:
                lines = (inspect.getdoc(member) or "").splitlines() if callable(member) else []
                overloads = [line.split(". ", 1)[1] for line in lines if re.match(rf"\d+\. {name}\(", line)]
                api.setdefault(kind, {})[name] = "\n".join(overloads or [line for line in lines[:1] if line.startswith(f"{name}(")])
    return api


def of_stubs(text: str) -> dict[str, dict[str, str]]:
    """The same from a stub file."""
    api: dict[str, dict[str, str]] = {}
    for cls in (node for node in _parsed(text).body if isinstance(node, ast.ClassDef)):
        wanted = _all().get(cls.name, {})
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                prop = any("property" in ast.unparse(one) or "setter" in ast.unparse(one) for one in node.decorator_list)
                api.setdefault(cls.name, {}).setdefault(node.name, "" if prop else f"{node.name}({ast.unparse(node.args)})")
            names = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
            for name in names:
                if isinstance(name, ast.Name) and name.id in wanted:
                    api.setdefault(cls.name, {})[name.id] = ""
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                api.setdefault(cls.name, {})[node.name] = ""
    return api


def _parsed(text: str) -> ast.Module:
    """The stubs hold a few signatures that are no Python: those lines are left out."""
    lines = text.splitlines()
    for _ in range(50):
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError as error:
            number = (error.lineno or 1) - 1
            lines[number] = lines[number][: len(lines[number]) - len(lines[number].lstrip())] + "def _left_out(self) -> None:"
    raise ValueError("expected a stub file; more than 50 lines of it are no Python")


def _all() -> dict[str, dict[str, int | None]]:
    return {kind: USED.get(kind, {}) | RTX_ONLY.get(kind, {}) for kind in {**USED, **RTX_ONLY}}


def parameters(signature: str) -> tuple[int, int]:
    """Fewest and most positional arguments of a signature, `self` left out: both forms, pybind11's and a stub's."""
    inside = signature[signature.index("(") + 1 :]
    depth, parts, part = 0, list[str](), ""
    for letter in inside:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    named = [one.strip() for one in [*parts, part] if one.strip() not in ("", "/", "*")]
    named = [one for one in named if not one.startswith("self")]
    return sum("=" not in one for one in named), len(named)


def problems(api: Mapping[str, Mapping[str, str]], used: Mapping[str, Mapping[str, int | None]]) -> list[str]:
    """What bertopt uses and `api` does not have, or takes with another number of arguments."""
    found = []
    for kind, members in used.items():
        for name, count in members.items():
            if name not in api.get(kind, {}):
                if f"{kind}.{name}" not in OPTIONAL:
                    found.append(f"{kind}.{name} is not there")
                continue
            if count is not None and (signature := api[kind][name]):
                ranges = [parameters(line) for line in signature.splitlines()]
                if not any(fewest <= count <= most for fewest, most in ranges):
                    found.append(f"{kind}.{name} takes {ranges} arguments, bertopt passes {count}: {signature}")
    return found


def bindings(folder: Path) -> Any:
    """The module of TensorRT 11's wheel, imported over stub libraries."""
    with tempfile.TemporaryDirectory() as scratch:
        import ctypes

        for library, functions in _C_FUNCTIONS.items():
            source = Path(scratch, "stub.c")
            source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions))
            built = Path(scratch, library)
            subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(source), "-o", str(built)], check=True)
            ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)
        path = folder / "tensorrt_bindings" / "tensorrt.so"
        spec = importlib.util.spec_from_file_location("tensorrt", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def main() -> None:
    stubs, folder = Path(sys.argv[1]), Path(sys.argv[2])

    def version(of: Path) -> str:
        return next(of.glob("*.dist-info")).name.removesuffix(".dist-info")

    record = {
        version(stubs): of_stubs((stubs / "tensorrt_bindings" / "tensorrt.pyi").read_text("utf-8")),
        version(folder): of_module(bindings(folder)),
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", "utf-8")
    for name, api in record.items():
        print(name, sum(map(len, api.values())), problems(api, USED))


if __name__ == "__main__":
    main()
