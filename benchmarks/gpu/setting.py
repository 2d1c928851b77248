"""What every case of the GPU benchmark shares: the device, models of random weights, timing, memory."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

#: layers, hidden, heads, intermediate of each model; 30,522 words, 512 positions. `tiny` is for a try on a CPU.
MODELS = {
    "bert-base": (12, 768, 12, 3072), "minilm-l6": (6, 384, 12, 1536), "bert-large": (24, 1024, 16, 4096), "tiny": (2, 64, 4, 128),
}  # fmt: skip
VOCABULARY, POSITIONS = 30522, 512
#: Seconds of timing for each shape, and the fewest steps.
SECONDS, STEPS = 0.15, 5


class Missing(Exception):
    """This case cannot be run here, and why: a row of the result, no failure."""


@dataclass(frozen=True)
class Setting:
    """Where and how much. `done` are the keys of rows that an earlier call has measured."""

    device: str
    quick: bool
    out: Path
    done: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        return 0.02 if self.quick else SECONDS


def need(*modules: str) -> None:
    """Raise Missing naming the modules that are not installed."""
    absent = [name for name in modules if not _found(name)]
    if absent:
        raise Missing(f"not installed: {', '.join(absent)}")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def time_ms(run: Callable[[], Any], setting: Setting, warm: int = 3) -> dict[str, Any]:
    """Milliseconds of one run, which must return when the device is idle: median, quartiles, count."""
    for _ in range(1 if setting.quick else warm):
        run()
    taken: list[float] = []
    end = time.perf_counter() + setting.seconds
    while len(taken) < STEPS or (time.perf_counter() < end and len(taken) < 2000):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
        if setting.quick and len(taken) >= 2:
            break
    ordered = sorted(taken)
    return {
        "p50_ms": statistics.median(ordered), "p25_ms": ordered[len(ordered) // 4], "p75_ms": ordered[3 * len(ordered) // 4],
        "n": len(ordered),
    }  # fmt: skip


def flops(model: str, batch: int, sequence: int) -> float:
    """Operations of one forward of the encoder: two for each multiplication and addition of its matrix products."""
    layers, hidden, _, wide = MODELS[model]
    tokens = batch * sequence
    return float(layers * tokens * (2 * (4 * hidden * hidden + 2 * hidden * wide) + 4 * sequence * hidden))


def reset_memory(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def forget(device: str) -> None:
    """Give back what a case held, before another in the same process."""
    import gc

    if (compiler := sys.modules.get("torch._dynamo")) is not None:
        compiler.reset()
    gc.collect()
    if device == "cuda" and (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory(device: str) -> dict[str, int | None]:
    """Peak bytes of torch's allocator, and of the process where NVML tells."""
    if device != "cuda":
        return {}
    import os

    import torch

    held = None
    try:
        from bertopt.system import gpu

        held = gpu.memory_of(os.getpid(), None)
    except ImportError:
        pass
    return {"torch_peak_bytes": torch.cuda.max_memory_allocated(), "process_bytes": held}


class Busy:
    """The share of time with a kernel running, as NVML samples it while the context is open; None where it cannot tell."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        self._stop = threading.Event()
        self._percents: list[int] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if device == "cuda" and _found("pynvml"):
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml

    @property
    def share(self) -> float | None:
        return statistics.mean(self._percents) / 100 if self._percents else None

    def __enter__(self) -> Busy:
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        # A sample covers up to the last 0.2 s: the first ones would tell of what ran before.
        handle = self._nvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop.wait(0.2):
            self._percents.append(int(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu))


def spec(model: str) -> Any:
    from bertopt.core import Spec

    layers, hidden, heads, _ = MODELS[model]
    return Spec(
        family="bert", task="feature-extraction", inputs=("input_ids", "attention_mask", "token_type_ids"),
        outputs=("sentence_embedding",), layers=layers, heads=heads, hidden=hidden, vocabulary=VOCABULARY, token_types=2,
        pad_id=0, max_length=POSITIONS, text_length=POSITIONS, pooling="mean", normalize=True, parameters=0, positions="column",
    )  # fmt: skip


def config(model: str) -> Any:
    import transformers

    layers, hidden, heads, wide = MODELS[model]
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=wide,
        max_position_embeddings=POSITIONS, attn_implementation="eager",
    )  # fmt: skip


def eager(model: str, folder: Path, device: str = "cpu") -> Any:
    """A BERT with mean pooling and seeded random weights, as bertopt's float32 reference; a tokenizer lies in `folder`."""
    need("transformers", "pydantic", "tokenizers")
    import torch
    import transformers

    from bertopt.core import Eager
    from bertopt.modeling.network import Network

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    torch.manual_seed(0)
    with torch.device(device):
        encoder = transformers.BertModel(config(model), add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, tensor in encoder.named_parameters():
            # At its initial 0.02 attention is uniform and hides errors.
            if tensor.dim() > 1 and "embeddings" not in name:
                tensor.mul_(2.0)
    encoder.config.save_pretrained(folder)
    described = spec(model)
    network = Network(encoder, described).eval().requires_grad_(False)
    return Eager(described, "float32", checkpoint=folder, network=network)


def write_tokenizer(folder: Path) -> None:
    """WordPiece over invented words: every word of a text is one token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(VOCABULARY - 5))]
    fast = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "BertTokenizer", "model_max_length": POSITIONS, "pad_token": "[PAD]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")


def sentence_transformer(model: str, folder: Path, device: Any) -> Any:
    """The same model in sentence-transformers, in bf16 with the attention it chooses."""
    need("sentence_transformers")
    import torch
    from sentence_transformers import SentenceTransformer

    made = eager(model, folder)
    made.network.encoder.save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": MODELS[model][1], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}), "utf-8")
    return SentenceTransformer(str(folder), device=str(device), local_files_only=True).to(torch.bfloat16).eval()


def apply(
    model: Any, steps: list[tuple[str, dict[str, Any]]], setting: Setting, folder: Path, calibration: Sequence[str] = (),
    encode: Callable[[Sequence[Any]], dict[str, Array]] | None = None,
) -> Any:  # fmt: skip
    """Return `model` after passes named through the registry. Raises Missing where one is not registered or refuses."""
    from pydantic import ValidationError

    from bertopt.core import Context
    from bertopt.errors import Unsupported
    from bertopt.passes import registry

    before: list[Any] = []
    for name, options in steps:
        kind = registry.get(name)
        if kind is None:
            raise Missing(f"pass '{name}' is not registered")
        try:
            step = kind.model_validate(options)
        except ValidationError as error:
            raise Missing(f"pass '{name}' does not take {options}: {error.errors()[0]['msg']}") from error
        if reason := step.conflict(before) or step.device_conflict(setting.device, before):
            raise Missing(f"{name}: {reason}")
        before.append(step)
        work = folder / f"{len(before):02d}-{name}"
        work.mkdir(parents=True, exist_ok=True)
        try:
            context = Context(work, setting.device, ((1, 16), (8, 128)), tuple(calibration), encode=encode)  # type: ignore[arg-type]
            model = step(model, context).model
        except (Unsupported, ImportError) as error:
            raise Missing(f"{name}: {error}") from error
    return model


def open_model(model: Any, device: str) -> Any:
    from bertopt.errors import Unsupported
    from bertopt.sessions import open_session

    try:
        return open_session(model, device)  # type: ignore[arg-type]
    except (Unsupported, ImportError) as error:
        raise Missing(str(error)) from error


def batch(rows: int, tokens: int, seed: int = 0, ragged: bool = False) -> dict[str, Array]:
    """Random ids [rows, tokens]; with `ragged` the texts have every length from a quarter on, padded on the right."""
    import numpy as np

    dice = np.random.default_rng(seed)
    ids = dice.integers(5, VOCABULARY, (rows, tokens), dtype=np.int64)
    mask = np.ones_like(ids)
    if ragged and tokens > 4:
        lengths = np.linspace(max(2, tokens // 4), tokens, rows).astype(int)
        mask = (np.arange(tokens)[None] < lengths[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def parity(answers: Array, expected: Array) -> dict[str, float]:
    import numpy as np

    a, b = answers.astype(np.float64), expected.astype(np.float64)
    cosine = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    return {"rel_l2": float(error) if math.isfinite(error) else math.inf, "cosine_min": float(np.nan_to_num(cosine, nan=-1).min())}


def lengths(count: int) -> list[int]:
    """Tokens of `count` texts, as committed: 1,024 numbers with the spread of short questions, sentences and passages."""
    known = json.loads((Path(__file__).with_name("lengths.json")).read_text("utf-8"))
    return [known[number % len(known)] for number in range(count)]


def texts(count: int) -> list[str]:
    """Texts of those lengths ([CLS] and [SEP] included) in invented words, all different."""
    import numpy as np

    dice = np.random.default_rng(1)
    return [" ".join(f"w{word}" for word in dice.integers(0, VOCABULARY - 5, max(1, length - 2))) for length in lengths(count)]


def on(device: str) -> torch.device:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Missing("torch sees no CUDA GPU here")
    return torch.device(device)
