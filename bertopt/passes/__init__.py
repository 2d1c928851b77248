"""The passes. Adding one: a file, a line here, a test, a recipe line. Outside code calls `register`."""

from __future__ import annotations

import warnings

from bertopt.passes.build_native import BuildNative
from bertopt.passes.build_tensorrt import BuildTensorrt
from bertopt.passes.capture_graphs import CaptureGraphs
from bertopt.passes.cast_half import CastHalf
from bertopt.passes.cast_onnx_half import CastOnnxHalf
from bertopt.passes.compile_torch import CompileTorch
from bertopt.passes.convert_openvino import ConvertOpenvino
from bertopt.passes.export_onnx import ExportOnnx
from bertopt.passes.fuse_ort import FuseOrt
from bertopt.passes.keep_cls_only import KeepClsOnly
from bertopt.passes.merge_qkv import MergeQkv
from bertopt.passes.pack_sequences import PackSequences
from bertopt.passes.package_aot import PackageAot
from bertopt.passes.quantize_fp8 import QuantizeFp8
from bertopt.passes.quantize_int8 import QuantizeInt8
from bertopt.passes.registry import all_passes, get, register, require
from bertopt.passes.use_better_transformer import UseBetterTransformer
from bertopt.passes.use_sdpa import UseSdpa

__all__ = [
    "BuildNative",
    "BuildTensorrt",
    "CaptureGraphs",
    "CastHalf",
    "CastOnnxHalf",
    "CompileTorch",
    "ConvertOpenvino",
    "ExportOnnx",
    "FuseOrt",
    "KeepClsOnly",
    "MergeQkv",
    "PackSequences",
    "PackageAot",
    "QuantizeFp8",
    "QuantizeInt8",
    "UseBetterTransformer",
    "UseSdpa",
    "all_passes",
    "get",
    "register",
    "require",
]

for _cls in (
    UseSdpa, UseBetterTransformer, KeepClsOnly, MergeQkv, PackSequences, CastHalf, QuantizeFp8, CaptureGraphs, CompileTorch, ExportOnnx, FuseOrt, CastOnnxHalf, QuantizeInt8, ConvertOpenvino, BuildTensorrt, PackageAot, BuildNative,
):  # fmt: skip
    register(_cls)

_RENAMED = {"find": "get", "known": "all_passes", "need": "require"}


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise AttributeError(f"module 'bertopt.passes' has no attribute '{name}'")
    warnings.warn(f"bertopt.passes.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
