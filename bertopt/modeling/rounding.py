"""Simulate reduced precision: the fp32 reference with every product or operator rounded as a reduced form rounds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bertopt.core import HalfRounding, Int8Rounding, Precision
from bertopt.modeling import deberta, encoder_layers

aten = torch.ops.aten
#: Where in the arguments of each matrix product its two factors begin.
_FACTORS = {**dict.fromkeys((aten.mm, aten.bmm, aten.matmul, aten.linear), 0), **dict.fromkeys((aten.addmm, aten.baddbmm), 1)}
#: What computes angles of rotary positions, by a part of its class's name, and methods that put distances between tokens into buckets. Every
#: reduced form computes both in float32: rounded, late positions and far distances would be others, and whatever a stage does with these would
#: be less wrong than its twin.
_ANGLES, _BUCKETS = "RotaryEmbedding", ("get_rel_pos", "relative_position_bucket")


def simulate(
    network: Any, precision: Precision, how: Int8Rounding | HalfRounding = "operators", draw: int = 0, calibrate: Callable[[], object] | None = None
) -> None:
    """Make the float32 `network` round as `precision` does, in place; pooling and outputs stay float32.

    Half precision rounds every weight and the result of every operator of the encoder, but angles of rotary positions and buckets of distances
    only when they are ready; or what its products multiply alone, as `how` says. INT8 rounds what linear layers read, all or those that `how`
    says: weights to 8 bits, or the 7 that it says, symmetric, one scale an output channel; activations to 8 bits, asymmetric, scaled as it
    says (default: one scale a batch). Static scales are measured while `calibrate` runs the network. fp8 rounds the base model's linear
    layers to e4m3, one scale an output and a token, and the rest to bfloat16. Sums are float32 in all. Every `draw` other than 0 moves the
    steps of INT8 weights, or scales what is rounded to fewer bits, at random, which gives other errors of the same size.
    """
    generator = torch.Generator().manual_seed(draw) if draw else None
    if precision == "int8":
        _simulate_int8(network, how if isinstance(how, Int8Rounding) else Int8Rounding(), generator, calibrate)
        return
    dtype = torch.bfloat16 if precision == "float8" else getattr(torch, precision)
    if how == "layer_products":
        _simulate_products(network, _Products(dtype, generator))
        return
    if precision == "float8":
        for module in network.base.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = _float8(module.weight.data, generator)
                module.register_forward_pre_hook(lambda _, inputs: (_float8(inputs[0], generator), *inputs[1:]))
    # Tables that the configuration gives, such as frequencies of rotary positions, are not stored and stay float32, as a cast leaves them.
    for tensor in {id(tensor): tensor for tensor in network.encoder.state_dict(keep_vars=True).values()}.values():
        if tensor.is_floating_point():
            tensor.data = _rounded(tensor.data, dtype, generator)
    if network.base.config.model_type == "deberta":
        deberta.norm_at_once(network.encoder)
    run, mode = network.encode, _Rounding(dtype, generator)
    for module in network.encoder.modules():
        names = ("forward",) if _ANGLES in type(module).__name__ else tuple(name for name in _BUCKETS if hasattr(module, name))
        for name in names:
            setattr(module, name, mode.inside_float32(getattr(module, name)))

    def rounding(*args: Any, **named: Any) -> Any:
        with mode:
            return run(*args, **named)

    network.encode = rounding


def _simulate_products(network: Any, products: _Products) -> None:
    """Round in the encoder's layers and in the linear layers before them and over the vocabulary."""
    inside, _, beside = _places(network)
    linear = [module for module in network.encoder.modules() if isinstance(module, nn.Linear) and id(module) not in inside | beside]
    for module in (*encoder_layers.distinct(network.base), *linear):
        module.forward = _within(products, module.forward)


def _within(products: _Products, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def rounding(*args: Any, **named: Any) -> Any:
        with products:
            return forward(*args, **named)

    return rounding


def _simulate_int8(network: Any, how: Int8Rounding, generator: torch.Generator | None, calibrate: Callable[[], object] | None) -> None:
    modules = list(network.encoder.modules())
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    if how.layers_only:
        layers = _without_those_beside(network, layers, generator)
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    if how.scales == "static":
        assert calibrate is not None, "static scales are measured"
        shared = {id(table.weight) for table in tables}
        hooks = [_StaticInputs(layer, None if id(layer.weight) in shared else how.smooth_quant, how.smooth_shared) for layer in layers]
        for hook in hooks:
            network.register_forward_pre_hook(hook.begin)
        calibrate()
        for hook in hooks:
            hook.fix()
    else:
        for layer in layers:
            layer.register_forward_pre_hook(_round_token_inputs if how.scales == "token" else _round_inputs)
    done = set[int]()
    for module in (*layers, *(tables if how.embeddings else ())):
        if id(module.weight) not in done:
            done.add(id(module.weight))
            # Nothing is summed up in a table, so that its rows keep 8 bits.
            steps = 64 if how.weight_bits == 7 and module not in tables else 127
            module.weight.data = _int8_weights(module.weight.data, steps, generator)


def _without_those_beside(network: Any, linear: list[nn.Linear], generator: torch.Generator | None) -> list[nn.Linear]:
    """Return the `linear` layers that are in the encoder's layers or in a head over the vocabulary; what projects embeddings rounds to bfloat16."""
    _, before, beside = _places(network)
    for module in linear:
        if id(module) in before:
            module.forward = _within(_Products(torch.bfloat16, generator), module.forward)  # type: ignore[method-assign]
    return [module for module in linear if id(module) not in before | beside]


def _places(network: Any) -> tuple[set[int], set[int], set[int]]:
    """Return the identities of modules in the encoder's layers, before them (a projection of embeddings), and beside them: the pooler and
    heads, other than one over the vocabulary."""
    base, pooler = network.base, getattr(network.base, "pooler", None)
    inside = {id(module) for layer in encoder_layers.distinct(base) for module in layer.modules()}
    behind = {id(module) for module in pooler.modules()} if pooler is not None else set[int]()
    of_base = {id(module) for module in base.modules()}
    head = {id(module) for module in network.encoder.modules()} - of_base
    return inside, of_base - inside - behind, behind | (set() if network.spec.over_vocabulary else head)


class _StaticInputs:
    """Rounds what `layer` reads, [..., H], with one scale for each call of a forward: that of the largest range until `fix`.

    A layer whose weights several places share is called several times, and each place has its own scale. With
    SmoothQuant's `alpha`, channels are divided by a factor [H], by which the weights' are multiplied; a layer that is
    called several times only where `smooth_shared`.
    """

    def __init__(self, layer: nn.Linear, alpha: float | None, smooth_shared: bool) -> None:
        self.layer, self.alpha, self.smooth_shared = layer, alpha, smooth_shared
        self.call = 0
        self.ranges = list[tuple[torch.Tensor, torch.Tensor]]()
        self.factor: torch.Tensor | None = None
        layer.register_forward_pre_hook(self)

    def begin(self, *_: Any) -> None:
        """Count the calls of the next forward from the first."""
        self.call = 0

    def __call__(self, _: Any, inputs: Any) -> Any:
        values, call = inputs[0], self.call
        self.call += 1
        if self.factor is None:
            rows = values.reshape(-1, values.shape[-1])
            seen = rows.amin(dim=0).clamp_max(0), rows.amax(dim=0).clamp_min(0)
            if call == len(self.ranges):
                self.ranges.append(seen)
            else:
                low, high = self.ranges[call]
                self.ranges[call] = torch.minimum(low, seen[0]), torch.maximum(high, seen[1])
            return None
        low, high = self.ranges[min(call, len(self.ranges) - 1)]
        return (_int8_activations(values / self.factor, low.amin(), high.amax()), *inputs[1:])

    def fix(self) -> None:
        self.factor = torch.ones(self.layer.in_features, device=self.layer.weight.device)
        if not self.ranges:  # never called: nothing reads it
            self.ranges.append((torch.zeros_like(self.factor), torch.zeros_like(self.factor)))
        if self.alpha is not None and (self.smooth_shared or len(self.ranges) == 1):
            seen = torch.stack([torch.maximum(high, -low) for low, high in self.ranges]).amax(dim=0)
            weights = self.layer.weight.data.abs().amax(dim=0)
            used = (seen > 0) & (weights > 0)
            self.factor[used] = seen[used] ** self.alpha / weights[used] ** (1 - self.alpha)
        self.ranges = [(low / self.factor, high / self.factor) for low, high in self.ranges]
        self.layer.weight.data = self.layer.weight.data * self.factor


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Round the float32 results of every operator to `dtype`. Beyond its range lies infinity, as in a cast network, but the
    lowest number of float32, with which scores are masked, becomes the lowest of `dtype`."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.generator, self.paused = dtype, generator, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        return answer if self.paused or func.is_view else tree_map_only(torch.Tensor, self._round, answer)

    def inside_float32(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with nothing rounded but what it returns."""

        def run(*args: Any, **named: Any) -> Any:
            self.paused = True
            try:
                return tree_map_only(torch.Tensor, self._round, function(*args, **named))
            finally:
                self.paused = False

        return run

    def _round(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        lowest = tensor == torch.finfo(torch.float32).min
        return _rounded(tensor, self.dtype, self.generator).masked_fill_(lowest, torch.finfo(self.dtype).min)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Round what each matrix product multiplies to `dtype`, nothing else."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.generator = dtype, generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func.overloadpacket)
        if first is not None:
            factors = (_rounded(factor, self.dtype, self.generator) for factor in args[first : first + 2])
            args = (*args[:first], *factors, *args[first + 2 :])
        return func(*args, **(kwargs or {}))


def _rounded(tensor: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """`tensor` rounded to `dtype`; with `generator` multiplied by a random number before and divided after, so that its elements round otherwise."""
    factor = 1.0 if generator is None else 0.5 + 0.5 * float(torch.rand((), generator=generator))
    return tensor.to(dtype).to(tensor.dtype) if generator is None else (tensor * factor).to(dtype).to(tensor.dtype) / factor


def _int8_weights(weight: torch.Tensor, steps: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Weights [out, in] rounded to `steps` each way from 0 an output channel, moved at random with `generator`."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / steps
    moved = torch.rand(weight.shape, generator=generator).to(weight) - 0.5 if generator else torch.zeros_like(weight)
    return ((weight / scale + moved).round() - moved) * scale


def _float8(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Values [..., N] rounded to e4m3 with one scale for each row; `generator` as `_rounded` has them."""
    scale = values.abs().amax(dim=-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    # Of zeros: a row of padding in DeBERTa.
    scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
    return _rounded(values / scale, torch.float8_e4m3fn, generator) * scale


def _round_inputs(_: Any, inputs: Any) -> Any:
    return (_int8_activations(inputs[0], inputs[0].amin(), inputs[0].amax()), *inputs[1:])


def _round_token_inputs(_: Any, inputs: Any) -> Any:
    low, high = inputs[0].amin(dim=-1, keepdim=True), inputs[0].amax(dim=-1, keepdim=True)
    return (_int8_activations(inputs[0], low, high), *inputs[1:])


def _int8_activations(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Values rounded to 256 steps between `low` and `high`, zero among them (ONNX's DynamicQuantizeLinear)."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / scale).round()
    return ((values / scale + zero).round().clamp(0, 255) - zero) * scale
