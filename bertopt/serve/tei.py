"""text-embeddings-inference's routes: what each answers to a checked payload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.errors import UsageError
from bertopt.runtime import task_outputs
from bertopt.serve.call import Call
from bertopt.serve.errors import RequestError
from bertopt.serve.model import ServedModel
from bertopt.serve.payloads import (
    Embed,
    EmbedSparse,
    Payload,
    Predict,
    PredictParameters,
    Rerank,
    Similarity,
    SimilarityParameters,
    Tokenize,
    refuse_options,
)
from bertopt.serve.task_parameters import answer_options, zero_shot_labels
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array


async def embed(call: Call, asked: Embed) -> Any:
    """Return one embedding for each text."""
    model = call.model
    _only_embeddings(model)
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    refuse_options(asked, model.spec.embedding_size, model.side)
    if asked.normalize is False and model.spec.normalize:
        raise RequestError(422, "normalize: the model normalises its embeddings itself; leave it out", "normalize")
    vectors = await _embeddings(call, prompted(model, texts, asked.prompt_name), asked.truncate)
    return np.ascontiguousarray(vectors[:, : asked.dimensions]) if asked.normalize is False else normalised(model, vectors, asked.dimensions)


async def embed_sparse(call: Call, asked: EmbedSparse) -> Any:
    """Return, for each text, the ids whose weights are not 0, and these."""
    model = call.model
    if not model.spec.sparse:
        why = "gives dense embeddings: use /embed" if model.embeds else f"is made for {model.spec.task}: use /predict"
        raise RequestError(424, f"/embed_sparse needs a SPLADE model, and '{model.name}' {why}")
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    refuse_options(asked, 0, model.side)
    outputs = await call.outputs(prompted(model, texts, asked.prompt_name), asked.truncate)
    answers = (one.answer() for one in model.weights(outputs))
    return [[{"index": index, "value": value} for index, value in zip(one["indices"], one["values"], strict=True)] for one in answers]


async def predict(call: Call, asked: Predict, sequences: bool = False) -> Any:
    """Return all labels with scores, best first; for models that answer about tokens, what the predictor answers, with `sequences` as
    `task_outputs.fill` has them."""
    model = call.model
    if model.embeds:
        raise RequestError(424, f"'{model.name}' is an embedding model, not a classifier; use /embed")
    if model.spec.sparse:
        raise RequestError(424, f"'{model.name}' is an embedding model, not a classifier; use /embed_sparse")
    texts, single = _sequences(asked.inputs)
    refuse_options(asked, 0, model.side)
    parameters = asked.parameters or PredictParameters()
    if parameters.candidate_labels is not None:
        return await _zero_shot(call, asked, parameters, texts, single)
    how = answer_options(parameters, model.spec)
    outputs = await call.outputs(texts, asked.truncate, stride=how.stride)
    if model.spec.task != "text-classification":
        answers = await model.answers(texts, outputs, call.until, how, parameters.ignore_labels, sequences)
    else:
        answers = _labelled(model, model.vectors(outputs), "none" if asked.raw_scores else parameters.function_to_apply, parameters.top_k)
    return answers[0] if single else answers


async def _zero_shot(call: Call, asked: Predict, parameters: PredictParameters, texts: list[Text], single: bool) -> Any:
    """Return, for each text, the candidate labels with scores, best first."""
    model, most = call.model, call.model.settings.request_texts
    labels = zero_shot_labels(parameters, model.spec)
    if asked.raw_scores:
        raise RequestError(422, "raw_scores: a zero-shot classification compares scores of several labels: leave it out", "raw_scores")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(422, f"inputs[{number}]: expected one text; got a pair, whose second text is made of a label: send [[a], [b], …]", "inputs")
    if len(texts) * len(labels.labels) > most:
        raise RequestError(422, f"parameters.candidate_labels: texts times labels may be at most {most}; got {len(texts)} × {len(labels.labels)}: send several requests", "parameters.candidate_labels")
    try:
        labels.check_length(model.predictor.tokenizer)
    except UsageError as error:
        raise RequestError(422, f"parameters.{error}", "parameters.candidate_labels") from error
    outputs = await call.outputs(labels.pairs([text for text in texts if isinstance(text, str)]), asked.truncate)
    answers = labels.answers(model.vectors(outputs))
    return answers[0] if single else answers


async def rerank(call: Call, asked: Rerank) -> Any:
    """Return the texts' numbers with scores for the query, best first, `top_n` at most."""
    refuse_options(asked, 0, call.model.side)
    found, _ = await ranked(call, asked.query, asked.texts, bool(asked.raw_scores), asked.truncate, "texts")
    return [{"index": i, **({"text": asked.texts[i]} if asked.return_text else {}), "score": score} for i, score in found[: asked.top_n]]


async def ranked(
    call: Call, query: str, texts: list[str], raw: bool, truncate: bool | None, where: str
) -> tuple[list[tuple[int, np.float32]], int]:
    """Return number and score of each text, best first, and the tokens of all; `where` is the texts' field of the request."""
    model = call.model
    if not model.spec.ranks:
        raise RequestError(424, f"'{model.name}' is not a re-ranker, a classifier with one label")
    outputs = await call.outputs([(query, text) for text in texts], truncate, where)
    logits = model.vectors(outputs)
    found = task_outputs.rank(logits, logits if raw else task_outputs.sigmoid(logits))
    # As float32 they are written in its digits, as text-embeddings-inference writes them.
    return [(i, np.float32(score)) for i, score in found], outputs.tokens


async def similarity(call: Call, asked: Similarity) -> Any:
    """Return the cosine of each sentence's embedding with the source sentence's."""
    _only_embeddings(call.model)
    if not asked.inputs.sentences:
        raise RequestError(422, "inputs.sentences: expected at least one text; got none", "inputs.sentences")
    parameters = asked.parameters or SimilarityParameters()
    refuse_options(parameters, 0, call.model.side)
    texts = prompted(call.model, [asked.inputs.source_sentence, *asked.inputs.sentences], parameters.prompt_name)
    vectors = await _embeddings(call, texts, parameters.truncate)
    unit = normalised(call.model, vectors)
    return unit[1:] @ unit[0]


async def tokenize(call: Call, asked: Tokenize) -> Any:
    """Return the tokens of each text, uncut. `start` and `stop` count characters; special tokens have none."""
    texts = [str(text) for text in prompted(call.model, [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs, asked.prompt_name)]
    if not 0 < len(texts) <= call.model.settings.request_texts:
        raise RequestError(422, f"inputs: expected 1 to {call.model.settings.request_texts} texts; got {len(texts)}", "inputs")
    return await call.model.tokens(texts, asked.add_special_tokens, call.until)


#: The routes, also below `/models/NAME` where several models are served.
ROUTES: dict[str, tuple[Callable[..., Awaitable[Any]], type[Payload]]] = {
    "/embed": (embed, Embed), "/embed_sparse": (embed_sparse, EmbedSparse), "/predict": (predict, Predict), "/rerank": (rerank, Rerank), "/similarity": (similarity, Similarity),
    "/tokenize": (tokenize, Tokenize),
}  # fmt: skip


async def root(call: Call, body: bytes) -> Any:
    """Return what a client wants that knows no route, as Hugging Face's does: embeddings, labels, or ranks."""
    if call.model.embeds:
        return await embed(call, call.parse(Embed, body))
    if call.model.spec.sparse:
        return await embed_sparse(call, call.parse(EmbedSparse, body))
    if call.model.spec.ranks and b'"query"' in body:
        return await rerank(call, call.parse(Rerank, body))
    asked = call.parse(Predict, body)
    answer = await predict(call, asked, sequences=True)
    # Hugging Face's clients expect a list of texts here, also where they sent one; and no list of masks where there is one.
    single, task = isinstance(asked.inputs, str), call.model.spec.task
    if single and task == "fill-mask" and len(answer) == 1:
        return answer[0]
    zero_shot = asked.parameters is not None and asked.parameters.candidate_labels is not None
    return [answer] if single and task == "text-classification" and not zero_shot else answer


def normalised(model: ServedModel, vectors: Array, dimensions: int | None = None) -> Array:
    """Embeddings [N, H], or their first numbers [N, dimensions], of length 1; whole ones of a model that normalises stay as they are
    to the last bit."""
    if model.spec.normalize and dimensions in (None, vectors.shape[1]):
        return vectors
    vectors = vectors[:, :dimensions]
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12))


def prompted(model: ServedModel, texts: Sequence[Text], name: str | None) -> Sequence[Text]:
    """Put the model's prompt `name` before each text; not before more than are answered, which are refused where they are counted."""
    if len(texts) > model.settings.request_texts:
        return texts
    try:
        return model.predictor.prompted(texts, name)
    except UsageError as error:
        raise RequestError(422, str(error), "prompt_name") from error


async def _embeddings(call: Call, texts: Sequence[Text], truncate: bool | None) -> Array:
    return call.model.vectors(await call.outputs(texts, truncate))


def _only_embeddings(model: ServedModel) -> None:
    if model.spec.sparse:
        raise RequestError(424, f"'{model.name}' gives sparse embeddings; use /embed_sparse")
    if not model.embeds:
        why = "gives an embedding a token" if model.spec.task == "feature-extraction" else f"is made for {model.spec.task}"
        raise RequestError(424, f"'{model.name}' is not an embedding model: it {why}; use /predict")


def _sequences(inputs: str | list[str] | list[list[str]]) -> tuple[list[Text], bool]:
    """Return texts and pairs, and whether one was given by itself."""
    if isinstance(inputs, str):
        return [inputs], True
    if inputs and all(isinstance(one, str) for one in inputs):
        inputs, single = [list(map(str, inputs))], True
    else:
        single = False
    texts: list[Text] = []
    for number, one in enumerate(inputs):
        if len(one) not in (1, 2):
            raise RequestError(422, f"inputs[{number}]: expected a text or a pair of texts; got {len(one)} texts: send [[a], [b], …]", "inputs")
        texts.append(one[0] if len(one) == 1 else (one[0], one[1]))
    return texts, single


def _labelled(model: ServedModel, logits: Array, function: str | None, most: int | None) -> list[list[dict[str, Any]]]:
    """Return the `most` labels with the best scores: `function` of the logits [N, C], by default what the model was trained for."""
    functions = {"none": lambda values: values, "sigmoid": task_outputs.sigmoid, "softmax": task_outputs.softmax}
    scores = task_outputs.label_scores(model.spec, logits) if function is None else functions[function](logits)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    labels = model.spec.labels
    return [[{"score": row[i], "label": labels[i]} for i in best] for row, best in zip(scores, order.tolist(), strict=True)]
