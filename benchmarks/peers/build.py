"""Make what a peer runs from a checkpoint, with that peer's own exporter and python.

    PYTHON benchmarks/peers/build.py WHAT SOURCE OUT TEXTS SAMPLES

SOURCE is a sentence-transformers folder, OUT the folder to be written, TEXTS a folder whose `train.jsonl` has texts to
calibrate on, SAMPLES how many of them to use, 0 for the library's own number.
"""

from __future__ import annotations

import sys
from typing import Any, Literal


def opened(source: str, backend: Literal["onnx", "openvino"], arguments: dict[str, Any]) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(source, device="cpu", backend=backend, model_kwargs=arguments)


def onnx(source: str, out: str, texts: str, samples: int) -> None:
    """float32 ONNX, and its qint8 for AVX512-VNNI beside it."""
    from sentence_transformers import export_dynamic_quantized_onnx_model

    model = opened(source, "onnx", {"provider": "CPUExecutionProvider", "export": True})
    model.save_pretrained(out)
    export_dynamic_quantized_onnx_model(model, "avx512_vnni", out)


def openvino(source: str, out: str, texts: str, samples: int) -> None:
    """float32 IR, and qint8 by static quantisation beside it."""
    from sentence_transformers import export_static_quantized_openvino_model

    model = opened(source, "openvino", {"export": True})
    model.save_pretrained(out)
    config = {"bits": 8, "num_samples": samples} if samples else None
    export_static_quantized_openvino_model(
        model, config, out, dataset_name=texts, dataset_config_name="default", dataset_split="train", column_name="text"
    )


def ctranslate2(source: str, out: str, texts: str, samples: int) -> None:
    """int8 weights, the tokenizer beside them."""
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

    TransformersConverter(source, copy_files=["tokenizer.json"]).convert(out, quantization="int8", force=True)


if __name__ == "__main__":
    what, source, out, texts, samples = sys.argv[1:]
    {"onnx": onnx, "openvino": openvino, "ctranslate2": ctranslate2}[what](source, out, texts, int(samples))
