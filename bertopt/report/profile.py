"""Where the time of one call goes: by encoder layer and by class of operator."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

#: Operators of ONNX Runtime, OpenVINO and torch by what they do. What is in none of them is 'other'.
_CLASSES = {
    "matrix product": "matmul fusedmatmul gemm fusedgemm fullyconnected convolution matmulinteger matmulintegertofloat "
                      "dynamicquantizematmul qlinearmatmul qgemm matmulnbits addmm mm bmm baddbmm linear mkldnn_linear "
                      "quantized_linear _addmm_activation",
    "attention": "attention multiheadattention qattention packedmultiheadattention softmax scaleddotproductattention "
                 "scaledattn mha _softmax _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
                 "_native_multi_head_attention _masked_softmax",
    "normalisation": "layernormalization skiplayernormalization embedlayernormalization simplifiedlayernormalization mvn rms "
                     "native_layer_norm",
    "activation": "gelu biasgelu fastgelu quickgelu erf tanh relu sigmoid silu",
    "embedding": "gather embedding index_select gathernd gatherelements embeddingbagoffsets index",
    "quantise": "quantizelinear dequantizelinear dynamicquantizelinear fakequantize quantize_per_tensor",
    "element-wise": "add mul sub div eltwise math subgraph where select max min pow sqrt neg greater greaterorequal and or not "
                    "equal multiply subtract masked_fill add_ mul_ div_ fill_ bitwise_and_ bitwise_and le ge",
    "copy and shape": "reshape transpose concat slice unsqueeze squeeze shape expand cast split reorder convert memory "
                      "broadcast range tile stridedslice shapeof copy_ clone contiguous view cat _to_copy empty empty_strided",
    "compiled kernels": "call compiledfxgraph",
}  # fmt: skip
CLASSES = (*_CLASSES, "other")
_CLASS_OF = {operator: name for name, operators in _CLASSES.items() for operator in operators.split()}

BEFORE, AFTER, UNKNOWN, BETWEEN = "before the layers", "after the layers", "other", "between operators"


def class_of(operator: str) -> str:
    """Return the class of an operator as a runtime names it: `FusedMatMul`, `aten::addmm`."""
    return _CLASS_OF.get(operator.rpartition("::")[2].lower(), "other")


class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(_Result):
    """One kind of operator in one layer, as the mean of a call."""

    layer: str
    """`layer 3`, BEFORE or AFTER them; UNKNOWN where the runtime does not say."""
    operator: str
    """The runtime's own name of it."""
    operators: str
    """Its class, one of CLASSES."""
    calls: float
    ms: float


class Attention(_Result):
    """Attention probabilities of the fp32 reference for one text, the mean over the heads of each layer."""

    text: str
    tokens: list[str]
    layers: list[list[list[float]]]
    """[layer][from token][to token]; each row sums to 1."""


class Profile(_Result):
    directory: str
    form: str
    precision: str
    runtime: str
    batch: int
    sequence: int
    runs: int
    wall_ms: float
    """Mean time of a call while it is profiled; `rows` and `between_ms` sum to it."""
    plain_ms: float
    """Median time of a call that is not profiled."""
    rows: list[Row]
    between_ms: float
    """What no operator accounts for: the runtime's own work, launches and waiting."""
    attention: Attention | None = None

    @property
    def explained(self) -> float:
        """Share of the call's time that operators account for."""
        return 1 - self.between_ms / self.wall_ms if self.wall_ms else 0.0

    def words(self) -> list[str]:
        """What was measured, and how much of it the rows explain."""
        return [
            f"{self.form}, {self.precision}, {self.runtime}; batch {self.batch} × {self.sequence}, mean of {self.runs} calls",
            f"operators account for {self.explained:.0%} of a call, which takes {self.wall_ms:.3f} ms while it is profiled "
            f"and {self.plain_ms:.3f} ms (median) otherwise",
        ]

    def by_layer(self) -> dict[str, float]:
        """Milliseconds of each layer, in order, those of no layer last."""
        sums = self._sums(lambda row: row.layer)
        return {layer: sums[layer] for layer in sorted(sums, key=layer_order)}

    def by_class(self) -> dict[str, float]:
        """Milliseconds of each class of operators, the largest first."""
        sums = self._sums(lambda row: row.operators)
        return {name: sums[name] for name in sorted(sums, key=lambda name: (-sums[name], CLASSES.index(name)))}

    def _sums(self, key: Callable[[Row], str]) -> dict[str, float]:
        names = {key(row) for row in self.rows}
        return {name: sum(row.ms for row in self.rows if key(row) == name) for name in names}


def layer_order(name: str) -> tuple[int, int]:
    """For sorting layers as they are run."""
    number = name.removeprefix("layer ")
    if number.isdigit():
        return 1, int(number)
    return {BEFORE: 0, AFTER: 2}.get(name, 3), 0
