"""Open an artefact with somebody else's library, run by the python of that library's environment: print outputs as JSON.

    PYTHON tests/ecosystem/open_elsewhere.py '{"library": "sentence-transformers", "form": "onnx", "directory": …, …}'

Nothing of bertopt is imported, and the calls are those of the libraries' manuals.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CLASSES = {
    "text-classification": "ForSequenceClassification", "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering", "fill-mask": "ForMaskedLM",
}  # fmt: skip


def sentence_transformers(directory: str, form: str, texts: list[str], options: dict[str, Any]) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(directory, backend=form, device="cpu", model_kwargs=options)
    return model.encode(texts, show_progress_bar=False).tolist()


def sparse_encoder(directory: str, form: str, texts: list[str], options: dict[str, Any]) -> Any:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(directory, backend=form, device="cpu", model_kwargs=options)
    return model.encode(texts, show_progress_bar=False, convert_to_sparse_tensor=False).tolist()


def optimum(directory: str, form: str, task: str, texts: list[Any], options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, pipeline
    from transformers.pipelines import PIPELINE_REGISTRY

    if form == "onnx":
        import optimum.onnxruntime as library

        name = f"ORTModel{CLASSES[task]}"
    else:
        import optimum.intel as library

        name, options = f"OVModel{CLASSES[task]}", {"subfolder": "openvino", **options}
    model, tokenizer = getattr(library, name).from_pretrained(directory, **options), AutoTokenizer.from_pretrained(directory)
    if task == "question-answering" and task not in PIPELINE_REGISTRY.get_supported_tasks():
        return [span(model, tokenizer, *text) for text in texts]
    run = pipeline(task, model=model, tokenizer=tokenizer)
    if task == "question-answering":
        return [run(question=question, context=context) for question, context in texts]
    outputs = run(texts)
    # A text with one mask: bertopt has a list for each mask.
    return [[each] for each in outputs] if task == "fill-mask" else outputs


def span(model: Any, tokenizer: Any, question: str, context: str) -> dict[str, Any]:
    """Return the most probable span of at most 15 tokens: transformers 5 has no pipeline for question answering.

    Token types are asked for, as transformers 5 leaves them out for tokenizers of no class of their family.
    """
    inputs = tokenizer(question, context, return_offsets_mapping=True, return_token_type_ids=True, return_tensors="pt")
    offsets, inside = inputs.pop("offset_mapping")[0].tolist(), [side == 1 for side in inputs.sequence_ids(0)]
    outputs = model(**inputs)
    start, end = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
    places = [(i, j) for i in range(len(inside)) for j in range(i, min(i + 15, len(inside))) if inside[i] and inside[j]]
    first, last = max(places, key=lambda place: start[place[0]] + end[place[1]])
    begin, finish = offsets[first][0], offsets[last][1]
    return {"answer": context[begin:finish], "start": begin, "end": finish}


def main() -> None:
    asked = json.loads(sys.argv[1])
    options = {} if asked["form"] == "onnx" else {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    if asked["library"] == "sentence-transformers":
        outputs = sentence_transformers(asked["directory"], asked["form"], asked["texts"], options)
    elif asked["library"] == "sparse-encoder":
        outputs = sparse_encoder(asked["directory"], asked["form"], asked["texts"], options)
    else:
        outputs = optimum(asked["directory"], asked["form"], asked["task"], asked["texts"], options)
    print(json.dumps(outputs, default=lambda value: value.item()))


if __name__ == "__main__":
    main()
