"""What a model takes and gives (`Spec`), the shapes it runs (`ShapeLimits`), what of that was run, and what a runtime reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import AliasChoices, BaseModel, Field, model_validator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["feature-extraction", "text-classification", "token-classification", "question-answering", "fill-mask"]
#: What one line of labelled texts says: a label or a number, or several labels.
Label = str | tuple[str, ...]
#: Whether an answer is one vector a text ([B, D]), one a token ([B, S, D]) or one a text over its tokens ([B, S]).
Granularity = Literal["text", "token", "span"]


@dataclass(frozen=True)
class Int8Rounding:
    """What decides how much INT8 costs."""

    scales: Literal["batch", "token", "static"] = "batch"
    """What one scale of activations covers; a static one is calibrated and covers every input."""
    embeddings: bool = False
    """Whether tables of embeddings have 8 bits too, with one scale an id."""
    smooth_quant: float | None = None
    """Alpha of SmoothQuant, which moves large channels of activations into the weights."""
    smooth_shared: bool = True
    """Whether it does so for layers whose weights several places share."""
    weight_bits: Literal[7, 8] | None = 8
    """None: 7 where the model was quantised for a CPU that saturates with 8, else 8. Activations always have 8."""


class DenseLayer(BaseModel, frozen=True, extra="forbid"):
    """A linear layer after pooling, in float32 in every precision: activation(x · Wᵀ + b), as sentence-transformers' Dense."""

    folder: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    """Where beside the checkpoint `model.safetensors` holds `linear.weight` [size, H] and, unless it has none, `linear.bias` [size]."""
    size: int
    activation: Literal["identity", "tanh", "relu", "gelu"]


class Spec(BaseModel, frozen=True, extra="forbid"):
    """What a model takes and gives, whatever form it is in. Written to every stage as part of its manifest."""

    family: str
    task: Task
    inputs: tuple[str, ...]
    """Names of the inputs of a padded batch, each int64 [B, S], in the order a padded network takes them."""
    outputs: tuple[str, ...]
    """Names of the answers, each float32; `sentence_embedding` [B, H], `logits` [B, C] or [B, S, C], …"""
    layout: Literal["padded", "packed"] = "padded"
    """How the network is fed: one text a row, or rows that each hold several (see `network_inputs`). Sessions of
    either take padded batches."""
    row_length: int | None = None
    """Tokens of one packed row; a longer text gets longer rows. None where the layout is padded, or packed rows may have any length: a
    batch is then one row."""
    one_row: bool = False
    """Whether a packed batch is always one row, whose attention goes from text to text and needs no mask."""
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    token_types: int
    pad_id: int
    max_length: int
    """Usable positions: RoBERTa's 514 position embeddings give 512 tokens."""
    text_length: int
    """Tokens after which a text is truncated: what the tokenizer or sentence-transformers says, at most `max_length`."""
    pooling: Literal["mean", "cls", "max", "mean_sqrt_len"] | None = None
    dense: tuple[DenseLayer, ...] = ()
    """Layers between pooling and normalisation."""
    normalize: bool = False
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    regression: bool = False
    parameters: int
    left_padding_invariant: bool = Field(False, validation_alias=AliasChoices("left_padding_invariant", "shift_free"))
    """Whether left padding leaves a text's output as it is: positions are relative or counted from the ids, and no
    head or pooling reads the first column. Manifests of 0.1 call it `shift_free`."""
    positions: Literal["column", "counted", "none"] = "column"
    """Where a token's absolute position comes from: its column, the valid ids before it, or there is none."""
    position_offset: int = 0
    """Position of a text's first token in the position embeddings: RoBERTa's padding id + 1, else 0."""

    @property
    def network_inputs(self) -> tuple[str, ...]:
        """Names of what the network itself takes, int64, in order.

        Packed: `input_ids`, `token_type_ids` where there are any, `position_ids` and `segment_ids`, each [R, L], and
        `first_tokens` [R, K] where the answer is one a text or all texts are one row. R rows of L tokens hold at most K texts each. The k-th text
        of a row (from 0) has segment k + 1 and begins in column `first_tokens[r, k]`; padding is segment 0. The answers
        are then [R, K, D], or [R, L, D] where there is one a token, [R, L] for spans.
        """
        if self.layout == "padded":
            return self.inputs
        ids = tuple(name for name in self.inputs if name != "attention_mask")
        first = ("first_tokens",) if self.granularity == "text" or self.one_row else ()
        return (*ids, "position_ids", "segment_ids", *first)

    @property
    def dimensions(self) -> dict[str, tuple[str, str]]:
        """What the two dimensions of each of `network_inputs` are called in exported graphs."""
        if self.layout == "padded":
            return dict.fromkeys(self.network_inputs, ("batch", "sequence"))
        wide = dict.fromkeys(self.network_inputs, ("rows", "row_length"))
        return {name: ("rows", "slots") if name == "first_tokens" else dims for name, dims in wide.items()}

    @property
    def granularity(self) -> Granularity:
        if self.task == "question-answering":
            return "span"
        if self.task == "text-classification" or self.pooling is not None:
            return "text"
        return "token"

    @property
    def embedding_size(self) -> int:
        """Numbers of an embedding: of a text's where the model pools, else of a token's."""
        return self.dense[-1].size if self.dense else self.hidden

    @property
    def output_size(self) -> int:
        """Numbers that one text or token gets: one for each id of the vocabulary, for each label, or those of an embedding."""
        return self.vocabulary if self.task == "fill-mask" else len(self.labels) or self.embedding_size

    @property
    def labelled(self) -> bool:
        """Whether the largest of a vector's numbers names a label, a place or a token."""
        return self.task != "feature-extraction"

    @property
    def gives_several(self) -> bool:
        """Whether a text has all labels whose score is above one half, not its best one."""
        return self.multi_label and self.task == "text-classification"

    @property
    def ranks(self) -> bool:
        """Whether it gives a (query, passage) pair one score."""
        return self.task == "text-classification" and len(self.labels) == 1

    @property
    def gives_numbers(self) -> bool:
        """Whether a text gets several numbers, which may be of unlike size."""
        return self.regression and self.task == "text-classification" and len(self.labels) > 1

    @property
    def graded(self) -> bool:
        """Whether a text's label is a number: its value, or how well its pair goes together (re-rankers, embeddings)."""
        return self.regression or (self.ranks and not self.multi_label) or self.task == "feature-extraction"

    def random_ids(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return int64 ids of the vocabulary, never the padding's: RoBERTa counts its positions by that."""
        ids = rng.integers(0, self.vocabulary - (self.pad_id < self.vocabulary), shape)
        return ids + (ids >= self.pad_id)

    def differences(self, other: Spec) -> str:
        """The fields that `other` says otherwise, of those that no pass may change: all but layout and parameters."""
        fixed = (name for name in type(self).model_fields if name not in ("layout", "row_length", "one_row", "parameters"))
        return ", ".join(name for name in fixed if getattr(self, name) != getattr(other, name))


class Profile(BaseModel, frozen=True, extra="forbid"):
    """One optimisation profile of an engine: the [B, S] shapes it accepts, and the one it is tuned for."""

    min: tuple[int, int] = (1, 1)
    opt: tuple[int, int] = (8, 128)
    max: tuple[int, int] = (32, 512)

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        for axis, name in enumerate(("batch", "sequence")):
            if not 1 <= self.min[axis] <= self.opt[axis] <= self.max[axis]:
                raise ValueError(
                    f"{name} must satisfy 1 <= min <= opt <= max; got {self.min[axis]}, {self.opt[axis]}, {self.max[axis]}"
                )
        return self

    def accepts(self, batch: int, sequence: int) -> bool:
        return self.min[0] <= batch <= self.max[0] and self.min[1] <= sequence <= self.max[1]


class PackageBuild(BaseModel, frozen=True, extra="forbid"):
    """What a package of compiled code was built with and for."""

    torch: str
    device: Literal["cpu", "cuda"]
    machine: str
    """`x86_64`, …"""
    instructions: tuple[str, ...] = ()
    """What the compiler could use of the CPU that built it."""
    capability: str | None = None
    """The GPU's, `sm90`; None on a CPU."""


class ShapeLimits(BaseModel, frozen=True, extra="forbid"):
    """The batches [B, S] that a form runs: up to `longest` tokens a row and, where there are profiles, within one of them.

    A session widens a batch that is smaller than a profile's lower bounds, and gives the answers that were asked for.
    """

    longest: int
    profiles: tuple[Profile, ...] = ()

    def fit(self, batch: int, sequence: int) -> tuple[int, int] | None:
        """Return the shape [B, S] that a batch is run as: its own, one widened to lower bounds, or None for no shape."""
        chosen = self.choose(batch, sequence)
        return chosen and chosen[1]

    def choose(self, batch: int, sequence: int) -> tuple[int, tuple[int, int]] | None:
        """Return the tightest profile's number, 0 where there are none, and the shape [B, S] that it runs a batch as."""
        if not 1 <= sequence <= self.longest:
            return None
        if not self.profiles:
            return 0, (batch, sequence)
        ways = [
            (rows * tokens, profile.max[0] * profile.max[1], number, (rows, tokens))
            for number, profile in enumerate(self.profiles)
            for rows, tokens in [(max(batch, profile.min[0]), max(sequence, profile.min[1]))]
            if rows <= profile.max[0] and tokens <= profile.max[1]
        ]
        return min(ways)[2:] if ways else None

    def most_rows(self, sequence: int) -> int | None:
        """Return the largest batch of rows that long: 0 where none is run, None where nothing bounds it."""
        if not self.profiles and sequence <= self.longest:
            return None
        rows = [profile.max[0] for profile in self.profiles if sequence <= profile.max[1]]
        return max(rows, default=0) if sequence <= self.longest else 0


class RuntimeFacts(BaseModel, frozen=True, extra="forbid"):
    """What a session says of itself. A field is None where its runtime has no such thing."""

    runtime: str | None = None
    """Name and version."""
    device: str | None = None
    gpu: str | None = None
    provider: str | None = None
    """ONNX Runtime's execution provider."""
    precision: str | None = None
    threads: int | Literal["all cores"] | None = None
    streams: int | None = None
    layout: str | None = None
    row_length: int | None = None
    graphs: int | None = None
    """Graphs that torch compiled in this process."""
    captured_graphs: int | None = None
    """CUDA graphs that the session captured so far."""
    nodes: dict[str, int] | None = None
    """Nodes of the graph by provider."""
    computing_nodes: dict[str, int] | None = None
    """Those of them that do more than arithmetic on shapes."""
    kernels: dict[str, int] | None = None
    """Matrix products of a quantised graph by the operator that runs them."""
    isa: str | None = None
    """Instruction set that the native encoder chose."""
    products: dict[str, int] | None = None
    """Matrix products by the precision that they run in."""
    output_formats: dict[str, int] | None = None
    """Outputs of an engine's layers by format and type, as its inspector spells them."""
    passes: tuple[str, ...] | None = None
    """Names of the passes that made the stage, first to last; set where effects are looked at."""
