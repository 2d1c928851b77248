"""`python tools/other_cpu.py write FOLDER` here, `… check FOLDER` on another CPU: the same files give what they must there.

`write` needs torch and transformers: it packs a small network of every family and of many shapes, and stores their inputs, transformers'
outputs and this CPU's. `check` needs neither, so that it runs in minutes in an emulator too: each of that CPU's instruction sets must be as
near to transformers as the tests ask and, where attention is float32 on both, give the bits of the CPU that wrote.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
from bertopt_native import families

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

#: Instruction sets whose attention is float32: they do the same operations in the same order.
FLOATS = ("avx2", "avx_vnni", "avx512_vnni", "neon_dotprod")
LENGTHS = [5, 1, 33, 64, 12, 2, 78, 31, 32, 130, 257, 8, 9, 17, 63, 65, 95, 96, 97, 159, 160, 161, 300]
SHAPES: dict[str, list[dict[str, Any]]] = {
    "bert": [
        {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 40}, {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 100},
        {"hidden_size": 256, "num_attention_heads": 2, "intermediate_size": 64}, {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 1}, {"hidden_act": "relu"}, {"hidden_act": "gelu_new"},
    ],
    "nomic_bert": [{"hidden_size": 96, "num_attention_heads": 2, "intermediate_size": 96}],
    "modernbert": [{"local_attention": 2}, {"local_attention": 62, "hidden_size": 96, "num_attention_heads": 4}, {"max_position_embeddings": 300}],
    "deberta-v2": [{"position_buckets": 256, "max_position_embeddings": 512}, {"position_buckets": -1, "max_position_embeddings": 300}, {"hidden_size": 96, "num_attention_heads": 4}],
    "ultrabert": [{"sliding_window": 31, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}],
    "roformer": [{"hidden_size": 96, "num_attention_heads": 4}],
    "eurobert": [{"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}],
}  # fmt: skip


def write(folder: Path) -> None:
    """Write a packed file and its inputs and outputs for each case."""
    from conftest import network, reference, state, texts_of
    from test_families import KINDS

    folder.mkdir(parents=True, exist_ok=True)
    isa = next((isa for isa in bertopt_native.supported() if isa in FLOATS), None)
    shapes: list[tuple[str, dict[str, Any]]] = [(kind, {"head": head}) for kind in KINDS for head in (False, *([True] if families.FAMILIES[kind].head else []))] + [(kind, options) for kind, several in SHAPES.items() for options in several]
    for number, ((kind, options), precision) in enumerate(itertools.product(shapes, ("int8", "bf16"))):
        model = network(kind, **options)
        path = folder / f"{number}.bin"
        head = options.get("head", False)
        bertopt_native.pack(path, model.config.to_dict(), state(model), precision, vocabulary_head=head)  # type: ignore[arg-type]
        encoder = bertopt_native.Encoder(path, threads=2, isa=isa)
        ids, starts = texts_of([min(n, encoder.info["longest_text"]) for n in LENGTHS])
        types = np.random.default_rng(2).integers(0, 2, len(ids)).astype(np.int32) if encoder.info["token_types"] > 1 else np.zeros(0, np.int32)
        given = types if len(types) else None
        case = json.dumps({"kind": kind, "options": options, "precision": precision, "isa": isa})
        outputs = {"want": reference(model, ids, starts, given, "logits" if head else "last_hidden_state"), "got": encoder.run(ids, starts, given, _output(options))}
        np.savez(folder / f"{number}.npz", ids=ids, starts=starts, types=types, case=np.array(case), **outputs)
        print(case, flush=True)


def _output(options: dict[str, Any]) -> Any:
    return "logits" if options.get("head") else "tokens"


def check(folder: Path) -> bool:
    """Return whether this CPU's instruction sets give what they must; print what each case gave."""
    from conftest import cosines

    good = True
    for path in sorted(folder.glob("*.npz"), key=lambda path: int(path.stem)):
        stored = np.load(path)
        case = json.loads(str(stored["case"]))
        types = stored["types"] if len(stored["types"]) else None
        for isa in bertopt_native.supported():
            one, two = (bertopt_native.Encoder(path.with_suffix(".bin"), threads=n, isa=isa).run(stored["ids"], stored["starts"], types, _output(case["options"])) for n in (1, 2))
            near = cosines(two, stored["want"])
            here, there = cosines(stored["got"], stored["want"]), bool((two == stored["got"]).all())
            # What the precision costs the CPU that wrote, whose tests passed, and what bf16 in attention costs besides (torch's own
            # costs networks whose stream is not normalised 2e-4 and, of a token, 4e-3).
            enough = 1 - near.mean() <= 1.5 * (1 - here.mean()) + 1e-4 and 1 - near.min() <= 2 * (1 - here.min()) + 1e-3
            fine = enough and bool((one == two).all()) and (there or isa not in FLOATS or case["isa"] is None)
            good = good and fine
            print(f"{'ok  ' if fine else 'FAIL'} {isa:13} cosine mean {near.mean():.6f}, least {near.min():.6f}, bits {'equal' if there else 'differ'}; {json.dumps(case)}", flush=True)
    return good


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    sys.exit(write(Path(sys.argv[2])) if sys.argv[1] == "write" else not check(Path(sys.argv[2])))
