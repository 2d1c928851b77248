"""A TensorRT engine from an ONNX graph: TensorRT 10 and 11, and TensorRT-RTX, which builds ahead of time."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from bertopt.core import Context, Engine, Onnx, Pass, Profile, Result, RuntimeFacts, ShapeLimits
from bertopt.errors import IntegrityError, Unsupported
from bertopt.system import atomic_write, gpu, tensorrt_import

_INSTALL = {"tensorrt": "pip install 'bertopt[gpu]' (NVIDIA's own index)", "tensorrt_rtx": "pip install 'bertopt[rtx]'"}

_NO_FLOAT32_ATTENTION = "TensorRT has no float32 Attention kernel: put cast_onnx_half before, or export with opset: 22"
_NO_ATTENTION = "; TensorRT reads Attention from 10.14 on; use that, or export with opset: 20"


class BuildTensorrt(Pass[Onnx, Engine]):
    """Build a strongly typed engine: the precision is the graph's, never a flag's. Counts layers per precision.

    `targets` builds ahead of time for other GPUs (TensorRT-RTX only); without it the engine is for the GPU here.
    `targets_if_no_gpu` says what to build for if there is no GPU here.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "pack_sequences": "profiles are of [batch, sequence]; packed rows have slots for their texts too: branch from a padded network",
        "fuse_ort": "TensorRT does not know ONNX Runtime's own operators; branch from export_onnx",
    }

    library: Literal["auto", "tensorrt", "tensorrt_rtx"] = Field(
        "auto", description="auto: tensorrt on a GPU, else tensorrt_rtx"
    )
    profiles: tuple[Profile, ...] = Field(
        (Profile(),), min_length=1, description="min, opt and max [batch, sequence] of each profile"
    )
    targets: tuple[str, ...] = Field(
        (), description="compute capabilities to build for, such as sm86; empty: the GPU here"
    )
    targets_if_no_gpu: tuple[str, ...] = Field(
        (), description="compute capabilities to build for where there is no GPU; where there is one: the GPU here"
    )
    timing_cache: str | None = Field(None, description="file that keeps kernel timings between builds; TensorRT-RTX has none")
    optimization_level: int = Field(3, ge=0, le=5, description="how long the builder searches")
    cuda_graphs: bool = Field(
        False, description="replay a CUDA graph: TensorRT then pads each batch to its profile's max, so state narrow profiles"
    )

    def shape_conflict(self, shapes: Any) -> str | None:
        for batch, sequence in shapes:
            if ShapeLimits(longest=sequence, profiles=self.profiles).fit(batch, sequence) is None:
                ranges = "; ".join(f"{list(p.min)} to {list(p.max)}" for p in self.profiles)
                return (
                    f"shape [{batch}, {sequence}] is outside every profile ({ranges}); widen profiles or drop the shape"
                )
        return None

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        if any(step.name() == "quantize_int8" and not getattr(step, "symmetric", False) for step in before):
            return "TensorRT takes static INT8 without zero points only; say quantize_int8: {scheme: static, symmetric: true}"
        names = {step.name() for step in before}
        native = any(step.name() == "export_onnx" and getattr(step, "opset", 0) >= 23 for step in before)
        if native and "use_sdpa" in names and not names & {"cast_half", "cast_onnx_half"}:
            return _NO_FLOAT32_ATTENTION
        return super().conflict(before)

    def __call__(self, model: Onnx, ctx: Context) -> Result[Engine]:
        library = self._library(ctx)
        trt: Any = importlib.import_module(library)
        logger = tensorrt_import.logger(trt)
        builder = trt.Builder(logger)
        if builder is None:
            raise Unsupported(f"{library} found no usable CUDA driver: {logger.last}")
        network = _parse(trt, builder, logger, model)
        layers = _layers(network)
        _check_precision(layers, model.precision)
        config = self._config(trt, builder, network, model)
        targets = self._targets(trt, config, ctx)
        # TensorRT-RTX takes one and does nothing with it.
        cache = self._read_cache(config, logger) if library == "tensorrt" else None
        if cache is None and self.timing_cache is not None:
            layers["timing_cache_not_used"] = 1
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise tensorrt_import.failure(f"{library} {trt.__version__} could not build the engine", f"{logger.last}{_advice(model, logger.last)}")
        self._write_cache(cache, config)
        folder = ctx.workdir / "engines" / f"{library}-{trt.__version__}_{'_'.join(targets)}"
        folder.mkdir(parents=True)
        path = folder / "model.plan"
        path.write_bytes(memoryview(plan))
        driver, cuda = tensorrt_import.built_with() if ctx.device == "cuda" else (None, None)
        engine = Engine(
            model.spec, model.precision, path, library, str(trt.__version__), targets, tuple(self._clamped(model)),
            hashlib.sha256(memoryview(plan)).hexdigest(), driver, cuda, self.cuda_graphs,
        )  # fmt: skip
        return Result(engine, layers)

    def effects(self, model: Engine, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """What the engine computes in, as far as its inspector tells; the answers alone are float32 in every engine."""
        formats = facts.output_formats or {}
        words = {"int8": "int8", "float16": "half|fp16", "bfloat16": "bf16|bfloat16", "float32": "float|fp32"}[model.precision]
        there = sum(count for kind, count in formats.items() if re.search(words, kind, re.IGNORECASE))
        found = {f"layer output in {model.precision}, or more": (1, min(1, there))} if formats else {}
        # TensorRT-RTX captures graphs out of sight.
        captured = {"captured graph, or more": (1, min(1, facts.captured_graphs))} if facts.captured_graphs is not None else {}
        return found | captured

    def _library(self, ctx: Context) -> str:
        """Return the library to build with: the stated one, or the installed one that suits the targets better."""
        wanted = ["tensorrt_rtx", "tensorrt"] if self.library == "auto" else [self.library]
        if self.library == "auto" and ctx.device == "cuda" and not self._wanted(ctx):
            wanted.reverse()
        name = next((name for name in wanted if importlib.util.find_spec(name) is not None), None)
        if name is None:
            raise Unsupported(f"no {' or '.join(wanted)} here; {' or '.join(_INSTALL[name] for name in wanted)}")
        if name == "tensorrt" and ctx.device == "cpu":
            raise Unsupported("tensorrt builds only where a GPU is; use library: tensorrt_rtx with targets to build ahead of time")
        return name

    def _clamped(self, model: Onnx) -> list[Profile]:
        """The profiles with sequences cut to the model's usable positions."""

        def cut(shape: tuple[int, int]) -> tuple[int, int]:
            return shape[0], min(shape[1], model.spec.max_length)

        return [Profile(min=cut(profile.min), opt=cut(profile.opt), max=cut(profile.max)) for profile in self.profiles]

    def _config(self, trt: Any, builder: Any, network: Any, model: Onnx) -> Any:
        config = builder.create_builder_config()
        config.builder_optimization_level = self.optimization_level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        # On by default: float32 products would be rounded to 10 bits.
        config.clear_flag(trt.BuilderFlag.TF32)
        for wanted in self._clamped(model):
            profile = builder.create_optimization_profile()
            for i in range(network.num_inputs):
                profile.set_shape(network.get_input(i).name, wanted.min, wanted.opt, wanted.max)
            if config.add_optimization_profile(profile) < 0:
                raise Unsupported(f"TensorRT refused the profile {wanted}; min <= opt <= max must hold")
        return config

    def _targets(self, trt: Any, config: Any, ctx: Context) -> tuple[str, ...]:
        wanted = self._wanted(ctx)
        if not wanted:
            if ctx.device == "cpu":
                raise Unsupported(
                    "no GPU here to build for; name some with targets: [sm86, sm89] to build ahead of time"
                )
            if hasattr(trt, "ComputeCapability"):
                # Left alone, TensorRT-RTX builds for several GPUs, of which this one need not be.
                config.num_compute_capabilities = 1
                config.set_compute_capability(trt.ComputeCapability.CURRENT, 0)
            return (gpu.capability(),)
        if not hasattr(trt, "ComputeCapability"):
            raise Unsupported("targets needs TensorRT-RTX; plain tensorrt builds for the GPU it runs on")
        known = {
            name.lower(): value for name, value in trt.ComputeCapability.__members__.items() if name.startswith("SM")
        }
        unknown = [target for target in wanted if target not in known]
        if unknown:
            raise Unsupported(f"targets must be among {', '.join(sorted(known))}; got {', '.join(unknown)}")
        config.num_compute_capabilities = len(wanted)
        for index, target in enumerate(wanted):
            config.set_compute_capability(known[target], index)
        return wanted

    def _wanted(self, ctx: Context) -> tuple[str, ...]:
        """The targets of this build; none: the GPU here."""
        return self.targets or (self.targets_if_no_gpu if ctx.device == "cpu" else ())

    def _read_cache(self, config: Any, logger: Any) -> Any:
        """The timing cache, or None where there is none to use: of another GPU or version, it would not be believed."""
        if self.timing_cache is None:
            return None
        path = Path(self.timing_cache)
        cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
        if cache is None:
            raise IntegrityError(f"timing_cache '{path}' is not a timing cache, or damaged ({logger.last}); delete it")
        return cache if config.set_timing_cache(cache, ignore_mismatch=False) else None

    def _write_cache(self, cache: Any, config: Any) -> None:
        if cache is None or self.timing_cache is None:
            return
        path = Path(self.timing_cache)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write.replacing(path) as new:
            new.write_bytes(memoryview(config.get_timing_cache().serialize()))


def _advice(model: Onnx, said: str) -> str:
    """What to do about the library's last message, `said`."""
    if "Attention operation was not supported" not in said:
        return ""
    if model.precision == "float32":
        return f"; {_NO_FLOAT32_ATTENTION}"
    return f"; TensorRT has no Attention kernel for heads of size {model.spec.hidden // model.spec.heads}: export with opset: 22"


def _parse(trt: Any, builder: Any, logger: Any, model: Onnx) -> Any:
    flags = trt.NetworkDefinitionCreationFlag
    network = builder.create_network(1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model.path)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        said = "; ".join(f"{error.node_operator()} '{error.node_name()}': {error.desc()}" for error in errors)[:400]
        unknown = any(error.node_operator() == "Attention" and "Plugin not found" in error.desc() for error in errors)
        raise Unsupported(f"TensorRT cannot parse the graph: {said}{_NO_ATTENTION if unknown else ''}")
    for i in reversed(range(network.num_outputs)):
        if network.get_output(i).name not in model.spec.outputs:
            network.unmark_output(network.get_output(i))
    return network


def _layers(network: Any) -> dict[str, int]:
    """Layers that multiply matrices, by the precision of their output, as they enter the strongly typed build."""
    kinds = {"MATRIX_MULTIPLY", "ATTENTION", "ATTENTION_INPUT", "FULLY_CONNECTED", "CONVOLUTION", "EINSUM"}
    short = {"HALF": "fp16", "FLOAT": "fp32", "BF16": "bf16"}
    counts = Counter[str]()
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type.name in kinds:
            dtype = layer.get_output(0).dtype.name
            counts[f"{short.get(dtype, dtype.lower())}_products"] += 1
        if layer.type.name == "DEQUANTIZE":
            counts["dequantize_layers"] += 1
    return {**counts, "layers": network.num_layers}


def _check_precision(layers: dict[str, int], precision: str) -> None:
    if precision in ("int8", "float8"):
        # Products stay float32 between the pairs that TensorRT fuses into them when it builds.
        if not layers.get("dequantize_layers"):
            raise Unsupported(f"expected quantised products; the network TensorRT parsed has {layers}")
        return
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(precision, precision)
    others = {kind: n for kind, n in layers.items() if kind.endswith("_products") and kind != f"{short}_products"}
    if others or not layers.get(f"{short}_products"):
        raise Unsupported(f"expected every matrix product in {short}; the network TensorRT parsed has {layers}")
