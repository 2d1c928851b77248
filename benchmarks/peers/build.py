"""Make what a peer runs from a checkpoint, with that peer's own exporter and python.

    PYTHON benchmarks/peers/build.py WHAT SOURCE OUT TEXTS SAMPLES

SOURCE is a sentence-transformers folder, OUT the folder to be written, TEXTS a folder whose `train.jsonl` has texts to
calibrate on, SAMPLES how many of them to use, 0 for the library's own number.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Literal


def opened(source: str, backend: Literal["onnx", "openvino"], arguments: dict[str, Any]) -> Any:
    from sentence_transformers import SentenceTransformer, SparseEncoder

    kind = SparseEncoder if "SpladePooling" in Path(source, "modules.json").read_text("utf-8") else SentenceTransformer
    return kind(source, device="cpu", backend=backend, model_kwargs=arguments)


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


def llama(source: str, out: str, texts: str, samples: int) -> None:
    """Q8_0 GGUF by llama.cpp's converter, which the environment has beside the bindings."""
    command = ["-m", "convert_hf_to_gguf", source, "--outfile", f"{out}/model.gguf", "--outtype", "q8_0"]
    subprocess.run([sys.executable, *command], check=True)


def inductor(source: str, out: str, texts: str, samples: int) -> None:
    """Static INT8 as torchao's manual makes it for Inductor on x86, the tokenizer beside it. torchao names no number of
    texts: 300, OpenVINO's in sentence-transformers. One at a time, none is padded."""
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-not-found]
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # type: ignore[import-not-found]
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    with Path(texts, "train.jsonl").open(encoding="utf-8") as lines:
        chosen = [json.loads(line)["text"] for line in islice(lines, samples or 300)]

    def inputs(few: list[str]) -> tuple[Any, Any]:
        encoded = tokenizer(few, padding=True, truncation=True, return_tensors="pt")
        return encoded["input_ids"], encoded["attention_mask"]

    # A tuple can be saved, transformers' own outputs cannot; a pooler that nothing reads ends the quantiser.
    network = AutoModel.from_pretrained(source, dtype=torch.float32, return_dict=False).eval()
    if hasattr(network, "pooler"):
        network.pooler = None
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=network.config.max_position_embeddings)}
    example = inputs(chosen[:2])
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    with torch.no_grad():
        exported = torch.export.export(network, example, dynamic_shapes=(shape, shape))
        prepared = prepare_pt2e(exported.module(), quantizer)
        for text in chosen:
            prepared(*inputs([text]))
        quantized = torch.export.export(convert_pt2e(prepared), example, dynamic_shapes=(shape, shape))
    torch.export.save(quantized, f"{out}/model.pt2")
    shutil.copy(f"{source}/tokenizer.json", out)


MAKERS = {"onnx": onnx, "openvino": openvino, "ctranslate2": ctranslate2, "llama": llama, "inductor": inductor}

if __name__ == "__main__":
    what, source, out, texts, samples = sys.argv[1:]
    MAKERS[what](source, out, texts, int(samples))
