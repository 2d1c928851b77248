"""The `README.md` of an artefact: what it is, what was checked, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bertopt.core import Spec
from bertopt.modeling.tokenizer import special_token
from bertopt.results import Latency, Stage
from bertopt.stages.manifest import Manifest

NAME = "README.md"
#: The classes of optimum that open an artefact, by task, without their prefix ORTModel or OVModel.
_OPTIMUM = {
    "feature-extraction": "ForFeatureExtraction", "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification", "question-answering": "ForQuestionAnswering", "fill-mask": "ForMaskedLM",
}  # fmt: skip
#: What sentence-transformers calls a form. Eager rewrites are bertopt's own: elsewhere the plain checkpoint would open.
BACKENDS = {"onnx": "onnx", "openvino": "openvino"}
_PRECISION = (
    "On CPUs with bfloat16 OpenVINO computes in bfloat16 there. For the outputs that were checked, give "
    '`{"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}` as `model_kwargs` (sentence-transformers) or as arguments (optimum).',
    "",
)
PACKED = (
    "Rows hold several texts: only bertopt opens this artefact. `bertopt optimize MODEL --portable` makes one that others open."
)

NATIVE = (
    "Weights are packed for bertopt-native: only bertopt opens this artefact, on x86-64 CPUs with AVX2 and ARM CPUs with dot products. "
    "`bertopt optimize MODEL --portable` makes one that others open."
)


def write(row: Stage, manifest: Manifest, directory: Path, model: str, quick: bool = False) -> str:
    """Return the model card of the artefact in `directory` as Markdown; `row` is its stage, `model` the checkpoint.

    `quick`: the timing was short, and its figures are left out.
    """
    return "\n".join(_lines(row, manifest, example(manifest.spec, directory), model, quick)) + "\n"


def opened_by(form: str, spec: Spec) -> str:
    """Return one sentence that says what opens an artefact of this form."""
    if form == "native":
        return NATIVE
    if spec.layout == "packed":
        return PACKED
    if form not in BACKENDS:
        return "Only bertopt opens this artefact as it was measured."
    others = ", sentence-transformers and" if spec.pooling is not None else " and"
    return f"This artefact opens in bertopt{others} optimum."


def _lines(row: Stage, manifest: Manifest, called: str, model: str, quick: bool) -> Iterator[str]:
    form, spec, environment = manifest.form, manifest.spec, manifest.environment
    yield from ("---", "tags: [bertopt]", f"pipeline_tag: {spec.task}", "---", "")
    yield f"# {model}, optimised by bertopt"
    yield ""
    yield f"{opened_by(form, spec)}"
    yield ""
    yield f"- model: {spec.family}, {spec.task}, {spec.parameters:,} parameters, texts up to {spec.text_length} tokens"
    if manifest.checkpoint_commit is not None:
        yield f"- commit of the checkpoint: {manifest.checkpoint_commit}"
    yield f"- form and precision: {form}, {manifest.precision}"
    yield f"- passes over the checkpoint: {' → '.join(f'`{record.name}`' for record in manifest.passes) or 'none'}"
    yield ""
    yield "## What was checked"
    yield ""
    yield "Against the fp32 checkpoint, in a fresh process, from the committed files:"
    yield ""
    yield from _checks(row)
    if quick:
        yield "- speed: timed briefly (`quick`), so no figures here; `bertopt bench DIR` measures them"
    else:
        yield from (f"- {_speed(case)}" for case in row.latency or () if case.vs_reference is not None)
    packages = environment["packages"]
    names = [name for name in ("torch", "onnxruntime", "openvino", "bertopt-native") if packages.get(name)]
    yield f"- measured on: {environment['cpu']}, {', '.join(f'{name} {packages[name]}' for name in names)}"
    yield ""
    yield "## How to load it"
    yield ""
    yield from ("From the Hugging Face hub fetch it into a new directory, without what the hub and its client add:", "")
    yield from ("    hf download ORG/NAME --local-dir DIR && rm -r DIR/.cache DIR/.gitattributes", "")
    yield from ("```python", "import bertopt", "", f'print(bertopt.load("DIR")({called}))', "```", "")
    if spec.layout == "padded" and form in BACKENDS:
        yield from _elsewhere(form, spec, _PRECISION if form == "openvino" and manifest.precision != "bfloat16" else ())
    yield "`bertopt verify DIR --against CHECKPOINT` repeats the checks on the machine that serves it."


def _checks(row: Stage) -> Iterator[str]:
    if row.parity is not None:
        worst = row.parity.worst
        yield f"- parity: {worst.metric} {worst.value:.6g}, limit {worst.limit:g}"
    if row.nearest is not None:
        nearest = row.nearest
        yield f"- of all limits, nearest: {nearest.metric} {nearest.value:.6g}, limit {nearest.limit:g}" + (f" ({nearest.where})" if nearest.where else "")
    if row.invariance is not None:
        yield f"- a text's output alone and among others differs by at most {row.invariance.max_abs:.3g}"
    if row.ranking is not None:
        yield f"- ranking of texts: Spearman's correlation {row.ranking.spearman:.4f}"
    if row.quality is not None:
        yield f"- {row.quality.metric}: {row.quality.value:.4f} (checkpoint {row.quality.reference:.4f}, {row.quality.n} texts)"
    yield from (f"- accepted although it misses a limit: {text}" for text in row.waived)


def example(spec: Spec, directory: Path) -> str:
    """Return suitable texts to call the artefact's predictor with, as Python code."""
    if spec.task == "fill-mask":
        return json.dumps([f"a {special_token(directory, 'mask_token')} text"], ensure_ascii=False)
    if spec.task == "question-answering":
        return '[("question", "context")]'
    return '[("a query", "a passage")]' if spec.ranks and not spec.regression else '["a text"]'


def loader(spec: Spec) -> str:
    """Return the name of sentence-transformers' class that opens an artefact of a pooled model."""
    return "SparseEncoder" if spec.sparse else "SentenceTransformer"


def _speed(case: Latency) -> str:
    what = "end to end on real texts" if case.kind == "mix" else f"batch {case.batch} × {case.sequence} tokens"
    return f"speed, {what}: {case.p50_ms:.2f} ms, {case.vs_reference} against the checkpoint in fp32"


def _elsewhere(form: str, spec: Spec, precision: tuple[str, ...]) -> Iterator[str]:
    if spec.pooling is not None:
        yield "With sentence-transformers:"
        name = loader(spec)
        yield from ("", "```python", f"from sentence_transformers import {name}", "")
        yield from (f'{name}("DIR", backend="{BACKENDS[form]}").encode(["a text"])', "```", "", *precision)
        return
    name = ("ORTModel" if form == "onnx" else "OVModel") + _OPTIMUM[spec.task]
    package = "optimum.onnxruntime" if form == "onnx" else "optimum.intel"
    folder = "" if form == "onnx" else ', subfolder="openvino"'  # optimum-intel looks in the root alone
    yield from ("With optimum:", "", "```python", f"from {package} import {name}", "", f'{name}.from_pretrained("DIR"{folder})', "```", "", *precision)
