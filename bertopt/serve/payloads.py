"""What requests carry. Types are strict: a number is no text, and null is no text."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from bertopt.runtime.entities import Aggregation
from bertopt.serve.errors import RequestError

T = TypeVar("T")


class _FirstMistake(FailFast):
    """pydantic's marker, which has no hash and so may not stand in a union."""

    __hash__ = object.__hash__


#: Checked up to the first mistake: an error for each of a million items takes gigabytes and stalls every other request.
List = Annotated[list[T], _FirstMistake()]


#: What the texts of a pair are called by Hugging Face's client, and by transformers' pipeline.
_PAIRS = (("question", "context"), ("text", "text_pair"))
#: Which end of a text is cut off, as text-embeddings-inference and its clients spell it.
Direction = Literal["left", "right", "Left", "Right"]


class Payload(BaseModel):
    """Unknown fields are ignored: clients of these APIs send some that say nothing to an encoder."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


class Embed(Payload):
    """`/embed`: text-embeddings-inference's."""

    inputs: str | List[str]
    normalize: bool | None = True
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class EmbedSparse(Payload):
    """`/embed_sparse`: text-embeddings-inference's, for a SPLADE model."""

    inputs: str | List[str]
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None


class PredictParameters(Payload):
    """What Hugging Face's clients say of a task, by its names there; `stride` and `doc_stride` split long texts into windows, and
    `candidate_labels` ask for a zero-shot classification."""

    aggregation_strategy: Aggregation | None = None
    ignore_labels: List[str] | None = None
    stride: int | None = None
    doc_stride: int | None = None
    top_k: int | None = None
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    targets: List[str] | None = None
    max_answer_len: int | None = None
    align_to_words: bool | None = None
    handle_impossible_answer: bool | None = None
    max_question_len: int | None = None
    max_seq_len: int | None = None
    candidate_labels: List[str] | None = None
    hypothesis_template: str | None = None
    multi_label: bool | None = None


class Predict(Payload):
    """`/predict`: a text, a pair `[a, b]`, `{"question": a, "context": b}` or `{"text": a, "text_pair": b}`, or a list of `[text]` and pairs."""

    inputs: str | List[str] | List[List[str]]
    parameters: PredictParameters | None = None
    raw_scores: bool | None = False
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @field_validator("inputs", mode="before")
    @classmethod
    def _questions(cls, inputs: Any) -> Any:
        """Take named texts for pairs."""
        return [_pair(one) for one in inputs] if isinstance(inputs, list) else _pair(inputs)


class Rerank(Payload):
    """`/rerank`: text-embeddings-inference's, and `top_n`, which that one lacks: clients that know the other shapes send it."""

    query: str
    texts: List[str]
    top_n: int | None = Field(None, ge=1)
    raw_scores: bool | None = False
    return_text: bool | None = False
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class Document(Payload):
    text: str


class Documents(Payload):
    """`/v1/rerank` and `/v2/rerank`: Cohere's and Jina's."""

    query: str
    documents: List[str | Document]
    model: str | None = None
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = False


class SimilarityInputs(Payload):
    source_sentence: str
    sentences: List[str]


class SimilarityParameters(Payload):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None


class Similarity(Payload):
    """`/similarity`."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class Tokenize(Payload):
    """`/tokenize`."""

    inputs: str | List[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class OpenAiEmbeddings(Payload):
    """`/v1/embeddings`: OpenAI's, and `prompt_name`. Token ids are of a tokenizer that the model does not have, so they are refused."""

    input: str | List[str]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


class KServeTensor(Payload):
    name: str
    shape: List[int]
    datatype: str
    data: List[Any] | None = None
    parameters: dict[str, Any] | None = None


class KServeOutput(Payload):
    name: str
    parameters: dict[str, Any] | None = None


class KServeInfer(Payload):
    """`/v2/models/NAME/infer`: one BYTES tensor of texts. `parameters` may have a `prompt_name`, and those of `/predict` about tokens."""

    inputs: List[KServeTensor] = Field(min_length=1)
    outputs: List[KServeOutput] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


def _pair(one: Any) -> Any:
    """Return two named texts as a list, whatever else as it is."""
    names = next((names for names in _PAIRS if isinstance(one, dict) and one.keys() == set(names)), None)
    return one if names is None else [one[name] for name in names]


def refuse_options(asked: Any, hidden: int, side: str) -> None:
    """Raise RequestError for options that an artefact cannot follow: it would be another model, which cuts texts at another `side`, or has
    fewer than these dimensions."""
    direction = getattr(asked, "truncation_direction", None)
    if direction is not None and direction.lower() != side:
        raise RequestError(422, f"truncation_direction: the artefact cuts at the {side}, as its tokenizer says; leave it out", "truncation_direction")
    dimensions = getattr(asked, "dimensions", None)
    if dimensions is not None and not 1 <= dimensions <= hidden:
        raise RequestError(422, f"dimensions: expected 1 to {hidden}, as many as the model gives; got {dimensions}", "dimensions")
