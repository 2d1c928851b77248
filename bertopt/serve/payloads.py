"""What requests carry. Types are strict: a number is no text, and null is no text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertopt.serve.errors import RequestError


class Payload(BaseModel):
    """Unknown fields are ignored: clients of these APIs send some that say nothing to an encoder."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())


class Embed(Payload):
    """`/embed`: text-embeddings-inference's."""

    inputs: str | list[str]
    normalize: bool | None = True
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class Predict(Payload):
    """`/predict`: a text, a pair `[a, b]`, or a list of `[text]` and `[a, b]`."""

    inputs: str | list[str] | list[list[str]]
    raw_scores: bool | None = False
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


class Rerank(Payload):
    """`/rerank`."""

    query: str
    texts: list[str]
    raw_scores: bool | None = False
    return_text: bool | None = False
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None


class SimilarityInputs(Payload):
    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Payload):
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    prompt_name: str | None = None


class Similarity(Payload):
    """`/similarity`."""

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class Tokenize(Payload):
    """`/tokenize`."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class OpenAiEmbeddings(Payload):
    """`/v1/embeddings`: OpenAI's. Token ids are of a tokenizer that the model does not have, so they are refused."""

    input: str | list[str]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class KServeTensor(Payload):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class KServeOutput(Payload):
    name: str
    parameters: dict[str, Any] | None = None


class KServeInfer(Payload):
    """`/v2/models/NAME/infer`: one BYTES tensor of texts."""

    inputs: list[KServeTensor] = Field(min_length=1)
    outputs: list[KServeOutput] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


def refuse_options(asked: Any, hidden: int) -> None:
    """Raise RequestError for options that an artefact cannot follow without becoming another model."""
    if getattr(asked, "prompt_name", None) is not None:
        raise RequestError(422, "prompt_name: the artefact has no prompts; put the prompt before the text", "prompt_name")
    if str(getattr(asked, "truncation_direction", None) or "right").lower() != "right":
        raise RequestError(422, "truncation_direction: the artefact cuts as its tokenizer says; leave it out", "truncation_direction")
    if (dimensions := getattr(asked, "dimensions", None)) not in (None, hidden):
        raise RequestError(422, f"dimensions: the model gives {hidden} and was proven with them; got {dimensions}: leave it out", "dimensions")
