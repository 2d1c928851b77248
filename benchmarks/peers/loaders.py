"""How each peer opens a model: options to a function from texts to vectors or labels, and facts.

Imported by the peer's own python beside `server.py`; nothing of this project is in its environment. Peers are used as their manuals say, with their defaults; only
threads are set. Texts of one call are sorted by length wherever the library does not do so by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Model = Callable[[Sequence[str]], Any]
Options = dict[str, Any]

#: Texts in one padded batch, sentence-transformers' default.
BATCH = 32


def in_batches(run: Callable[[list[str]], Any], texts: Sequence[str]) -> list[Any]:
    """Rows of `run`, which takes at most BATCH texts, longest first; given back in the order of `texts`."""
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        for i, row in zip(chosen, run([texts[i] for i in chosen]), strict=True):
            rows[i] = row
    return rows


def session_options(threads: int) -> Any:
    import onnxruntime

    chosen = onnxruntime.SessionOptions()
    chosen.intra_op_num_threads = threads
    return chosen


def sentence_transformers(options: Options) -> tuple[Model, dict[str, Any]]:
    """`backend`: torch (with `dtype`), onnx or openvino (with `file_name`)."""
    from sentence_transformers import SentenceTransformer

    model, facts = opened(SentenceTransformer, options)
    on_torch = options["backend"] == "torch"

    def encode(texts: Sequence[str]) -> Any:
        # numpy has no bfloat16: as torch tensors they can be made float32 afterwards.
        found = model.encode(list(texts), show_progress_bar=False, convert_to_tensor=on_torch)
        return found.float().numpy() if on_torch else found

    return encode, facts


def sparse_encoder(options: Options) -> tuple[Model, dict[str, Any]]:
    """The same of a SPLADE: its answer is a sparse tensor."""
    from sentence_transformers import SparseEncoder

    model, facts = opened(SparseEncoder, options)
    return lambda texts: model.encode(list(texts), show_progress_bar=False), facts


def opened(kind: Any, options: Options) -> tuple[Any, dict[str, Any]]:
    """A model of sentence-transformers, and what is known of it."""
    import torch

    threads, backend = options["threads"], options["backend"]
    torch.set_num_threads(threads)
    arguments: dict[str, Any] = {}
    if backend == "torch":
        arguments = {"dtype": options["dtype"]}
    elif backend == "onnx":
        arguments = {
            "provider": "CPUExecutionProvider", "file_name": options["file_name"],
            "session_options": session_options(threads),
        }  # fmt: skip
    elif backend == "openvino":
        arguments = {"file_name": options["file_name"], "ov_config": {"INFERENCE_NUM_THREADS": threads}}
    model = kind(options["directory"], device="cpu", backend=backend, model_kwargs=arguments)
    model.max_seq_length = options["max_length"]

    facts: dict[str, Any] = {"max_seq_length": model.max_seq_length}
    if backend == "torch":
        facts["blas"] = "mkl" if "BLAS_INFO=mkl" in torch.__config__.show() else "other"
        facts["dtype"] = str(next(model.parameters()).dtype)
    if backend == "openvino":
        inner: Any = model[0]
        network = getattr(inner, "auto_model", None) or inner.model
        if network.request is None:
            network.compile()
        compiled = network.request if hasattr(network.request, "get_property") else network.request.get_compiled_model()
        facts["precision"] = str(compiled.get_property("INFERENCE_PRECISION_HINT"))
    return model, facts


def plain_onnxruntime(options: Options) -> tuple[Model, dict[str, Any]]:
    """tokenizers and one session; mean pooling and normalisation in numpy."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{options['directory']}/tokenizer.json")
    tokenizer.enable_truncation(options["max_length"])
    tokenizer.enable_padding()
    path = f"{options['directory']}/{options['file_name']}"
    session = onnxruntime.InferenceSession(
        path, session_options(options["threads"]), providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]

    def run(texts: list[str]) -> Any:
        encoded = tokenizer.encode_batch(texts)
        arrays = {
            "input_ids": np.array([e.ids for e in encoded], np.int64),
            "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
            "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
        }
        hidden = session.run(None, {name: arrays[name] for name in names})[0]
        return unit_means(hidden, arrays["attention_mask"])

    return lambda texts: np.stack(in_batches(run, texts)), {"providers": session.get_providers()}


def plain_openvino(options: Options) -> tuple[Model, dict[str, Any]]:
    """tokenizers and one compiled model with `streams` requests in flight; mean pooling and normalisation in numpy."""
    import numpy as np
    import openvino
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{options['directory']}/tokenizer.json")
    tokenizer.enable_truncation(options["max_length"])
    tokenizer.enable_padding()
    config = {"INFERENCE_NUM_THREADS": options["threads"], "NUM_STREAMS": options["in_flight"]}
    compiled = openvino.Core().compile_model(f"{options['directory']}/{options['file_name']}", "CPU", config)
    names = [next(iter(port.names)) for port in compiled.inputs]
    rows: dict[int, Any] = {}

    def keep(request: Any, asked: tuple[Sequence[int], Any]) -> None:
        numbers, mask = asked
        rows.update(zip(numbers, unit_means(request.get_output_tensor(0).data, mask), strict=True))

    queue = openvino.AsyncInferQueue(compiled, options["in_flight"])
    queue.set_callback(keep)

    def model(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows.clear()
        for start in range(0, len(order), BATCH):
            numbers = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in numbers])
            arrays = {
                "input_ids": np.array([e.ids for e in encoded], np.int64),
                "attention_mask": np.array([e.attention_mask for e in encoded], np.int64),
                "token_type_ids": np.array([e.type_ids for e in encoded], np.int64),
            }
            queue.start_async({name: arrays[name] for name in names}, (numbers, arrays["attention_mask"]))
        queue.wait_all()
        return np.stack([rows[i] for i in range(len(texts))])

    return model, {"precision": str(compiled.get_property("INFERENCE_PRECISION_HINT"))}


def ctranslate2(options: Options) -> tuple[Model, dict[str, Any]]:
    """tokenizers and one encoder with all threads in one batch, which CTranslate2 pads itself; means in numpy."""
    import ctranslate2 as library  # type: ignore[import-not-found]
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{options['directory']}/tokenizer.json")
    tokenizer.enable_truncation(options["max_length"])
    tokenizer.no_padding()
    encoder = library.Encoder(options["directory"], "cpu", compute_type="int8", intra_threads=options["threads"])

    def run(texts: list[str]) -> Any:
        ids = [encoded.ids for encoded in tokenizer.encode_batch(texts)]
        hidden = np.array(encoder.forward_batch(ids).last_hidden_state)
        lengths = np.array([len(one) for one in ids])
        return unit_means(hidden, np.arange(hidden.shape[1]) < lengths[:, None])

    return lambda texts: np.stack(in_batches(run, texts)), {"precision": encoder.compute_type}


def inductor(options: Options) -> tuple[Model, dict[str, Any]]:
    """torch.compile in bf16 with frozen weights and dynamic shapes."""
    import torch
    from transformers import AutoModel

    network = AutoModel.from_pretrained(options["directory"], dtype=torch.bfloat16).eval()
    return compiled(network, options), {"dtype": str(network.dtype)}


def inductor_int8(options: Options) -> tuple[Model, dict[str, Any]]:
    """The same for a network that torchao has quantised and torch.export saved."""
    import torch

    # Registers Inductor's fusions of quantised products.
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer  # type: ignore[import-not-found]  # noqa: F401

    network = torch.export.load(f"{options['directory']}/model.pt2").module()
    return compiled(network, options), {"dtype": "int8"}


def compiled(network: Any, options: Options) -> Model:
    """tokenizers and torch.compile with frozen weights and dynamic shapes; means in numpy."""
    import numpy as np
    import torch
    import torch._inductor.config
    from tokenizers import Tokenizer

    torch.set_num_threads(options["threads"])
    torch._inductor.config.freezing = True
    tokenizer = Tokenizer.from_file(f"{options['directory']}/tokenizer.json")
    tokenizer.enable_truncation(options["max_length"])
    tokenizer.enable_padding()
    forward: Any = torch.compile(network, dynamic=True)

    def run(texts: list[str]) -> Any:
        encoded = tokenizer.encode_batch(texts)
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        with torch.no_grad():
            hidden = forward(ids, mask)[0]
        return unit_means(hidden.float().numpy(), mask.numpy())

    # One text alone is compiled by itself, everything else once.
    for texts in (["a", "a longer text"], ["a text"]):
        run(texts)
    return lambda texts: np.stack(in_batches(run, texts))


def llama(options: Options) -> tuple[Model, dict[str, Any]]:
    """llama.cpp, which tokenises and pools itself. 512 tokens in one batch are its default and the model's most: in a larger
    one every token is compared with more of other texts'. Flash attention is llama.cpp's default, not its bindings'."""
    import llama_cpp  # type: ignore[import-not-found]
    import numpy as np

    length, threads = options["max_length"], options["threads"]

    class Llama(llama_cpp.Llama):  # type: ignore[misc]
        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
            """Truncate as others do: to `max_length`, the last special token kept."""
            tokens: list[int] = super().tokenize(text, add_bos, special)
            return tokens if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]

    model = Llama(
        f"{options['directory']}/model.gguf", embedding=True, verbose=False, n_ctx=512, n_batch=512, n_ubatch=512,
        n_threads=threads, n_threads_batch=threads, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN, flash_attn=True,
    )  # fmt: skip
    facts = {"n_batch": model.n_batch, "system": llama_cpp.llama_print_system_info().decode()}
    return lambda texts: np.array(model.embed(list(texts), normalize=True), np.float32), facts


def unit_means(hidden: Any, mask: Any) -> Any:
    """Hidden states [B, S, H] to unit vectors [B, H]: the mean over the tokens that `mask` [B, S] keeps."""
    import numpy as np

    total = (hidden * mask[:, :, None].astype(np.float32)).sum(axis=1)
    return total / np.maximum(np.linalg.norm(total, axis=1, keepdims=True), 1e-12)


def optimum(options: Options) -> tuple[Model, dict[str, Any]]:
    """ORTModelForFeatureExtraction with transformers' tokenizer, the loop of optimum's manual."""
    import numpy as np
    from optimum.onnxruntime import ORTModelForFeatureExtraction
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["directory"])
    model = ORTModelForFeatureExtraction.from_pretrained(
        options["directory"], subfolder="onnx", file_name=options["file_name"].removeprefix("onnx/"),
        provider="CPUExecutionProvider", session_options=session_options(options["threads"]),
    )  # fmt: skip

    def run(texts: list[str]) -> Any:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=options["max_length"], return_tensors="np")
        return unit_means(model(**inputs).last_hidden_state, inputs["attention_mask"])

    return lambda texts: np.stack(in_batches(run, texts)), {}


def classifier(options: Options) -> tuple[Model, dict[str, Any]]:
    """AutoModelForSequenceClassification in torch float32: texts to labels."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(options["threads"])
    tokenizer = AutoTokenizer.from_pretrained(options["directory"])
    model = AutoModelForSequenceClassification.from_pretrained(options["directory"], dtype=torch.float32).eval()
    names = model.config.id2label

    def run(texts: list[str]) -> list[str]:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=options["max_length"], return_tensors="pt")
        with torch.inference_mode():
            return [names[i] for i in model(**inputs).logits.argmax(-1).tolist()]

    return lambda texts: in_batches(run, texts), {}
