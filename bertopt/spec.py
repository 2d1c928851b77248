"""A model's inputs and outputs (`Spec`), the shapes that it can run (`ShapeLimits`), and what a runtime reports (`RuntimeFacts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import AliasChoices, BaseModel, Field, model_validator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["feature-extraction", "text-classification", "token-classification", "question-answering", "fill-mask"]
#: One text, or a pair such as (query, passage).
Text = str | tuple[str, str]
#: The label in one line of labelled texts: a name or a number, or several names.
Label = str | tuple[str, ...]
#: How the vectors of a text's tokens become one. `splade` takes, for each id of the vocabulary, the largest of log(1 + relu(x)) over the
#: logits x of the masked language model; with `sum` their sum, with `log1p` of log(1 + log(1 + relu(x))). The others are
#: sentence-transformers' modes over hidden states.
PoolingMode = Literal["mean", "cls", "max", "mean_sqrt_len", "splade", "splade_log1p", "splade_sum", "splade_sum_log1p"]
SPLADE: tuple[PoolingMode, ...] = ("splade", "splade_log1p", "splade_sum", "splade_sum_log1p")
#: Whether an output has one vector for each text ([B, D]), one for each token ([B, S, D]), or one score for each token ([B, S]).
Granularity = Literal["text", "token", "span"]


class DenseLayer(BaseModel, frozen=True, extra="forbid"):
    """A linear layer after pooling, in float32 in every precision: activation(x · Wᵀ + b), as sentence-transformers' Dense."""

    folder: str = Field(pattern=r"^[^/\\.][^/\\]*$")
    """Folder beside the checkpoint whose `model.safetensors` holds `linear.weight` [size, H] and, if there is one, `linear.bias` [size]."""
    size: int
    activation: Literal["identity", "tanh", "relu", "gelu"]


class Spec(BaseModel, frozen=True, extra="forbid"):
    """The inputs and outputs of a model in any form. It is part of the manifest of every stage."""

    family: str
    task: Task
    inputs: tuple[str, ...]
    """Names of the inputs of a padded batch, each int64 [B, S], in the order of a padded network's arguments."""
    outputs: tuple[str, ...]
    """Names of the outputs, each float32: `sentence_embedding` [B, H], `logits` [B, C] or [B, S, C], …"""
    layout: Literal["padded", "packed"] = "padded"
    """Whether the network takes one text in each row, or several (see `network_inputs`). Sessions of either take padded batches."""
    row_length: int | None = None
    """Tokens of one packed row; a longer text gets longer rows. None where the layout is padded, or where packed rows may have any length:
    then a batch is one row."""
    one_row: bool = False
    """Whether a packed batch is always one row, whose attention is computed text by text without a mask."""
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    token_types: int
    pad_id: int
    max_length: int
    """Usable positions: RoBERTa's 514 position embeddings give 512 tokens."""
    text_length: int
    """Tokens after which a text is truncated, as the tokenizer or sentence-transformers says; at most `max_length`."""
    pooling: PoolingMode | None = None
    dense: tuple[DenseLayer, ...] = ()
    """Layers between pooling and normalisation."""
    normalize: bool = False
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    regression: bool = False
    parameters: int
    left_padding_invariant: bool = Field(False, validation_alias=AliasChoices("left_padding_invariant", "shift_free"))
    """Whether left padding does not change a text's output: positions are relative or counted from the ids, and no head or pooling reads
    the first column. Manifests of 0.1 call it `shift_free`."""
    positions: Literal["column", "counted", "none"] = "column"
    """Whether a token's absolute position is its column or the number of valid ids before it; `none`: there are no absolute positions."""
    position_offset: int = 0
    """Position of a text's first token in the position embeddings: RoBERTa's padding id + 1, else 0."""
    dropped_id: int | None = None
    """The mask token's id where its embedding is 0 and the share of such tokens scales a text's others (ESM's token_dropout)."""

    @property
    def network_inputs(self) -> tuple[str, ...]:
        """Names of the network's inputs, int64, in order.

        Packed: `input_ids`, `token_type_ids` where there are any, `position_ids` and `segment_ids`, each [R, L], and `first_tokens` [R, K]
        where outputs have one vector for each text, or all texts are in one row. R rows of L tokens hold at most K texts each. The k-th text
        of a row (from 0) has segment k + 1 and begins in column `first_tokens[r, k]`; padding is segment 0. The outputs are [R, K, D], or
        [R, L, D] with one vector for each token, or [R, L] for spans.
        """
        if self.layout == "padded":
            return self.inputs
        ids = tuple(name for name in self.inputs if name != "attention_mask")
        first = ("first_tokens",) if self.granularity == "text" or self.one_row else ()
        return (*ids, "position_ids", "segment_ids", *first)

    @property
    def dimensions(self) -> dict[str, tuple[str, str]]:
        """Names of the two dimensions of each of `network_inputs` in exported graphs."""
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
        """Size of an embedding: of a text's where the model pools, else of a token's."""
        if self.sparse:
            return self.vocabulary
        return self.dense[-1].size if self.dense else self.hidden

    @property
    def sparse(self) -> bool:
        """Whether a text's embedding has one weight for each id of the vocabulary, most of them 0 (SPLADE)."""
        return self.pooling in SPLADE

    @property
    def over_vocabulary(self) -> bool:
        """Whether the network makes a number for each id of the vocabulary at each token."""
        return self.task == "fill-mask" or self.sparse

    @property
    def token_output(self) -> str:
        """Name of the output that padded exports of a pooled model have besides, for other software: what is pooled, for each token."""
        return "logits" if self.sparse else "last_hidden_state"

    @property
    def output_size(self) -> int:
        """Numbers in the output for one text or token: one for each id of the vocabulary or each label, or those of an embedding."""
        return self.vocabulary if self.task == "fill-mask" else len(self.labels) or self.embedding_size

    @property
    def labelled(self) -> bool:
        """Whether the largest number of an output vector stands for a label, a position or a token."""
        return self.task != "feature-extraction"

    @property
    def gives_several(self) -> bool:
        """Whether a text gets all labels whose score is above one half, instead of the best one."""
        return self.multi_label and self.task == "text-classification"

    @property
    def ranks(self) -> bool:
        """Whether it gives one score to a (query, passage) pair."""
        return self.task == "text-classification" and len(self.labels) == 1

    @property
    def gives_numbers(self) -> bool:
        """Whether a text gets several numbers, which may differ in size."""
        return self.regression and self.task == "text-classification" and len(self.labels) > 1

    @property
    def graded(self) -> bool:
        """Whether a text's label is a number: a value, or the similarity or relevance of a pair (embeddings, re-rankers)."""
        return self.regression or (self.ranks and not self.multi_label) or self.task == "feature-extraction"

    def random_ids(self, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.int64]:
        """Return int64 ids of the vocabulary, never the padding's: RoBERTa counts its positions by that."""
        ids = rng.integers(0, self.vocabulary - (self.pad_id < self.vocabulary), shape)
        return ids + (ids >= self.pad_id)

    def padded_inputs(
        self, ids: NDArray[np.int64], mask: NDArray[np.int64], types: NDArray[np.int64] | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Return the inputs of a padded batch by name, given arrays [B, S]; without `types` all are 0."""
        import numpy as np

        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(mask) if types is None else types}
        return {name: np.ascontiguousarray(arrays[name], np.int64) for name in self.inputs}

    def differences(self, other: Spec) -> str:
        """Return the names of the fields that differ in `other`, of those that no pass may change: all but layout and parameters."""
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
    """Instruction sets that the compiler could use on the CPU that built it."""
    capability: str | None = None
    """Compute capability of the GPU, such as `sm90`; None on a CPU."""


class ShapeLimits(BaseModel, frozen=True, extra="forbid"):
    """The batches [B, S] that a form can run: up to `longest` tokens in each row and, where there are profiles, within one of them.

    A session pads a batch that is below a profile's lower bounds and returns only the outputs of the batch.
    """

    longest: int
    profiles: tuple[Profile, ...] = ()

    def fit(self, batch: int, sequence: int) -> tuple[int, int] | None:
        """Return the shape [B, S] as which a batch is run: its own, or padded to a profile's lower bounds; None if it cannot be run."""
        chosen = self.choose(batch, sequence)
        return chosen and chosen[1]

    def choose(self, batch: int, sequence: int) -> tuple[int, tuple[int, int]] | None:
        """Return the number of the tightest profile (0 where there are none) and the shape [B, S] as which it runs a batch; None for none."""
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
        """Return the largest batch of rows of this length: 0 where none can be run, None where there is no limit."""
        if not self.profiles and sequence <= self.longest:
            return None
        rows = [profile.max[0] for profile in self.profiles if sequence <= profile.max[1]]
        return max(rows, default=0) if sequence <= self.longest else 0


class RuntimeFacts(BaseModel, frozen=True, extra="forbid"):
    """What a session reports about itself. A field is None where its runtime has no such thing."""

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
