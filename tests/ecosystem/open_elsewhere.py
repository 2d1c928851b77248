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


def optimum(directory: str, form: str, task: str, texts: list[Any], options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer, pipeline

    if form == "onnx":
        import optimum.onnxruntime as library

        name = f"ORTModel{CLASSES[task]}"
    else:
        import optimum.intel as library

        name, options = f"OVModel{CLASSES[task]}", {"subfolder": "openvino", **options}
    model, tokenizer = getattr(library, name).from_pretrained(directory, **options), AutoTokenizer.from_pretrained(directory)
    run = pipeline(task, model=model, tokenizer=tokenizer)
    if task == "question-answering":
        return [run(question=question, context=context) for question, context in texts]
    outputs = run(texts)
    # A text with one mask: bertopt has a list for each mask.
    return [[each] for each in outputs] if task == "fill-mask" else outputs


def main() -> None:
    asked = json.loads(sys.argv[1])
    options = {} if asked["form"] == "onnx" else {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
    if asked["library"] == "sentence-transformers":
        outputs = sentence_transformers(asked["directory"], asked["form"], asked["texts"], options)
    else:
        outputs = optimum(asked["directory"], asked["form"], asked["task"], asked["texts"], options)
    print(json.dumps(outputs, default=lambda value: value.item()))


if __name__ == "__main__":
    main()
