"""A hash of a model's content: a stage with the same hash as its parent was not changed by its pass."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from typing import Any

from bertopt.core import Compiled, Eager, Model, Onnx
from bertopt.modeling.source import sha256
from bertopt.stages import FileModel, files_beside

#: Attributes that are left out: where a model was read from, and torch.compile's bookkeeping, which differs from run to run.
_NOT_THE_MODEL = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "_compiled_call_impl"})
#: How deeply attributes of a module are followed; deeper ones are mostly registries of libraries.
_DEPTH = 6
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum)


def fingerprint(model: Model) -> str:
    """Return the hash of `model`: of everything that determines what a torch network computes, of an ONNX graph, of other forms' files.

    Names of ONNX nodes and values and metadata do not count. A change outside the network, such as to a library's function, is not seen.
    """
    if isinstance(model, Eager | Compiled):
        return f"{model.form} {fingerprint_network(model.network)}"
    if isinstance(model, Onnx):
        return _graph_hash(model)
    assert isinstance(model, FileModel), f"form '{model.form}' has no file"
    hashes = (sha256(path) for path in (model.path, *files_beside(model)))
    return hashlib.sha256(" ".join([model.form, *hashes]).encode()).hexdigest()


def fingerprint_network(network: Any) -> str:
    """Return the hash of everything that determines what a torch network computes."""
    return _Network().of(network)


class _Network:
    """One walk over a torch network: modules, their attributes, tensors, and torch's settings."""

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}
        self.kept: list[Any] = []
        self.depth = 0

    def of(self, network: Any) -> str:
        import torch

        digest = hashlib.sha256()
        modules = list(network.named_modules(remove_duplicate=False))
        for name, module in reversed(modules):
            self.seen[id(module)] = f"module {name}"
        for name, module in modules:
            cls = type(module)
            own = {
                key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")
            }
            digest.update(f"{name}: {_path(cls)} {self._shown(cls.forward)} {self._shown(own)}\n".encode())
        tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            digest.update(f"{name}: {self._shown(tensor)}\n".encode())
        sdp: Any = torch.backends.cuda
        settings = (
            torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled, sdp.flash_sdp_enabled(), sdp.math_sdp_enabled(), sdp.mem_efficient_sdp_enabled(),
        )  # fmt: skip
        digest.update(repr(settings).encode())
        return digest.hexdigest()

    def _shown(self, value: Any) -> str:
        """Return `value` as text that is the same in every process."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if id(value) in self.seen:
            return self.seen[id(value)]
        if self.depth > _DEPTH:
            return _path(type(value))
        # Numbered before looking inside, since objects may contain themselves; kept alive, so that no other object gets its id.
        self.seen[id(value)] = f"again {len(self.seen)}"
        self.kept.append(value)
        self.depth += 1
        text = self._described(value)
        self.depth -= 1
        return text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()

    def _described(self, value: Any) -> str:
        import torch

        if isinstance(value, torch.Tensor):
            return f"tensor {value.dtype} {list(value.shape)} {value.requires_grad} {_tensor_hash(value)}"
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        if isinstance(value, Mapping):
            return f"{{{', '.join(sorted(f'{self._key(k)}: {self._shown(v)}' for k, v in value.items() if k not in _NOT_THE_MODEL))}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._shown, value))}]"
        if isinstance(value, set | frozenset):
            return f"set {sorted(map(self._shown, value))}"
        if isinstance(value, type):
            return _path(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.MethodType):
            return f"{self._shown(value.__func__)} of {self._shown(value.__self__)}"
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inside = self._shown([value.__defaults__, value.__kwdefaults__, cells])
            return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)} {inside}"
        if isinstance(value, functools.partial):
            return f"partial {self._shown([value.func, value.args, value.keywords])}"
        if isinstance(value, torch.nn.Module):
            return f"outside the tree: {_path(type(value))} {self._shown(vars(value))}"
        name = getattr(value, "__qualname__", "")
        return f"{_path(type(value))} {name} {self._shown(getattr(value, '__dict__', None))}"

    def _key(self, key: Any) -> str:
        # Hooks are kept under numbers that count up through the process.
        return "hook" if isinstance(key, int) else self._shown(key)


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _code(code: types.CodeType) -> str:
    inner = [_code(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return hashlib.sha256(repr((code.co_code, code.co_names, inner)).encode()).hexdigest()


def _tensor_hash(tensor: Any) -> str:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def _graph_hash(model: Onnx) -> str:
    import onnx_ir

    loaded = onnx_ir.load(model.path)
    digest = hashlib.sha256(repr(sorted(loaded.opset_imports.items())).encode())
    _feed_graph(digest, loaded.graph, {})
    digest.update(functions_hash(loaded).encode())
    return digest.hexdigest()


def functions_hash(loaded: Any) -> str:
    """Return the hash of what the functions of a loaded ONNX model compute, which its nodes call by name."""
    digest = hashlib.sha256()
    for identifier, function in sorted(loaded.functions.items()):
        digest.update(f"{identifier} {sorted(function.opset_imports.items())}\n".encode())
        _feed_graph(digest, function, {})
    return digest.hexdigest()


def _feed_graph(digest: Any, graph: Any, numbers: dict[Any, str]) -> None:
    """Add the nodes to `digest` in their order. A value is identified by its contents or the order of its first use."""
    import onnx_ir

    def told(value: Any) -> str:
        if value is None:
            return "none"
        if value not in numbers:
            held = value.const_value if value.is_initializer() else None
            numbers[value] = f"#{len(numbers)}" if held is None else _constant_hash(held)
        return numbers[value]

    for value in graph.inputs:
        digest.update(f"in {value.name} {value.dtype} {value.shape} {told(value)}\n".encode())
    for node in graph:
        line = f"{node.domain}:{node.op_type} {list(map(told, node.inputs))} {list(map(told, node.outputs))}"
        digest.update(line.encode())
        for name, attribute in sorted(node.attributes.items()):
            kind, held = attribute.type, attribute.value
            digest.update(f"{name} {kind} ".encode())
            if kind == onnx_ir.AttributeType.GRAPH:
                _feed_graph(digest, held, numbers)
            else:
                shown = _constant_hash(held) if kind == onnx_ir.AttributeType.TENSOR else repr(held)
                digest.update(shown.encode())
    for value in graph.outputs:
        digest.update(f"out {value.name} {value.dtype} {told(value)}\n".encode())


def _constant_hash(tensor: Any) -> str:
    return f"{tensor.dtype} {tensor.shape} {hashlib.sha256(tensor.tobytes()).hexdigest()}"
