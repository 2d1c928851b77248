"""Probes: the inputs on which a stage must agree with the reference.

The shape grid × padding patterns, with random tokens, plus real texts. Every probe says which tokens count.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bertopt.checks import mask_tokens, token_types
from bertopt.core import ShapeLimits, Spec
from bertopt.spec import Text

if TYPE_CHECKING:
    from bertopt.core import Array

PADDINGS = ("none", "right", "left", "holes", "one_token", "masked_row")
#: What a probe's `padding` says where its tokens are those of real texts.
REAL = ("text", "pair")
TEXT_BATCH = 8
#: Most padding tokens of a batch of texts sorted by length: another run costs about as much.
MAX_PADDING = 64
#: Tokens in each row of the predictor's largest batch, and how many times in succession one input is run.
SERVED_LENGTH, REPEATS = 8, 4
#: Outputs over a vocabulary are compared at this many tokens of each row: all of them would take gigabytes.
WIDE_TOKENS = 4
#: Most words masked in a text for fill-mask, and in every fourth text.
MASKS, MANY_MASKS = 3, 8
#: One layer's attention scores of the longest probe take at most this much; ModernBERT's 8192 tokens would take 3 GiB.
SCORE_BYTES = 2**30
#: Rows with more tokens are run in one padding pattern only, unless the recipe lists the shape.
LONG = 1024
#: Pairs of texts probed, for models that take pairs.
PAIRS = 16
#: Additional pairs whose first text is the beginning of the second one, and its number of words.
RELEVANT, QUERY_WORDS = 8, 6
#: Most prompts of an embedding model that are tried, and texts that follow each.
PROMPTS, PROMPTED = 8, 3
#: Families with layers whose tokens see those near them only.
_WINDOWED = ("modernbert", "ultrabert")
#: Texts and pairs, of all lengths, that are compared from text to output. Of the others, parity compares the outputs for given tokens.
END_TO_END_TEXTS = 32
#: Short texts in one call (more than the predictor tokenises at once), and most characters of each.
SNIPPETS, SNIPPET_LETTERS = 400, 20


@dataclass(frozen=True)
class Probe:
    """One batch. `compared` [B, S] marks the tokens whose outputs are compared, `rows` [B] the rows that have any.

    `texts` [B] are the rows' texts, where the probe is real text. The nearly equal probes `before` run right before it.
    """

    name: str
    padding: str
    inputs: dict[str, Array]
    compared: Array
    rows: Array
    texts: tuple[Text, ...] = ()
    before: tuple[Probe, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        batch, sequence = self.inputs["input_ids"].shape
        return batch, sequence


def built_in_texts() -> list[str]:
    """Return the 150 texts written for this project: from 0 to more than 512 tokens, in several scripts."""
    lines = Path(__file__).with_name("texts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def grid(
    spec: Spec, shapes: Sequence[tuple[int, int]], limits: ShapeLimits | None, seed: int = 0
) -> Iterator[Probe]:
    """Yield every shape of the recipe, and shapes it was not traced with, in every padding pattern.

    Shapes that `limits` do not admit, or that the model has no positions for, are left out.
    """
    longest = _bounded_length(spec)
    for batch, sequence in dict.fromkeys([*shapes, (1, 1), (1, min(longest, LONG)), (1, longest)]):
        if sequence > spec.max_length or (limits is not None and limits.fit(batch, sequence) is None):
            continue
        # Five patterns of a row of 4,096 tokens take half of all probes' time; the sweeps run the longest without padding.
        for padding in PADDINGS if sequence <= LONG or (batch, sequence) in shapes else ("right",):
            rng = np.random.default_rng([seed, batch, sequence, PADDINGS.index(padding)])
            mask = mask_of(padding, batch, sequence, rng)
            if mask is not None:
                yield probe_of(spec, padding, inputs_of(spec, mask, padding, rng))


def longest_row(spec: Spec) -> int:
    """Return the tokens of the longest row that is run: the longest text, or more, as far as attention scores have room (`SCORE_BYTES`)."""
    return max(spec.text_length, _bounded_length(spec))


def _bounded_length(spec: Spec) -> int:
    return min(spec.max_length, math.isqrt(SCORE_BYTES // (4 * spec.heads)))


def serving(spec: Spec, batch: int, seed: int = 0) -> Iterator[Probe]:
    """Yield what else a service sends: the predictor's largest batch [batch, S], and one input several times in succession."""
    shape = (batch, min(SERVED_LENGTH, spec.max_length))
    rng = np.random.default_rng([seed, *shape])
    mask = mask_of("right", *shape, rng)
    if mask is not None:
        yield probe_of(spec, "right", inputs_of(spec, mask, "right", rng), f"{shape[0]} × {shape[1]}, right, the predictor's largest batch")
    rng = np.random.default_rng([seed, REPEATS])
    inputs = inputs_of(spec, np.ones((1, shape[1]), np.int64), "none", rng)
    for number in range(1, REPEATS + 1):
        yield probe_of(spec, "none", inputs, f"1 × {shape[1]}, none, run {number} of {REPEATS} in a row")


def masked(texts: Sequence[str], mask_token: str) -> list[str]:
    """Return texts with one to three of their words replaced by the mask token, and up to eight in every fourth; short texts stay as they are."""
    rng = np.random.default_rng([0, len(texts)])
    found = []
    for number, text in enumerate(texts):
        words = text.split(" ")
        count = min(MANY_MASKS, len(words) // 2) if number % 4 == 3 else 1 + number % MASKS
        for place in rng.permutation(len(words))[:count] if len(words) > MASKS else ():
            words[place] = mask_token
        found.append(" ".join(words))
    return found


def prompted(texts: Sequence[str], prompts: Iterable[str]) -> list[str]:
    """Return texts with each prompt before them, as users of an embedding model send them: three texts, from short to long."""
    order = sorted(filter(str.strip, dict.fromkeys(texts)), key=len)
    chosen = [order[len(order) * part // (PROMPTED + 1)] for part in range(1, PROMPTED + 1)] if order else []
    return [prompt + text for prompt in islice(filter(None, dict.fromkeys(prompts)), PROMPTS) for text in dict.fromkeys(chosen)]


def texts(
    spec: Spec, encode: Callable[[Sequence[Any]], list[dict[str, Array]]], sample: Sequence[Text], kind: str = "text",
    mask_id: int | None = None,
) -> Iterator[Probe]:  # fmt: skip
    """Yield real texts in right-padded batches: one that mixes all lengths, the rest sorted and split so that there is little padding.

    A probe's name gives the 0-based numbers of its texts (or pairs, by `kind`). Where only a few tokens of a row are compared, those
    with the id `mask_id` come first.
    """
    lengths = [encode([text])[0]["input_ids"].shape[1] for text in sample]
    order = sorted(range(len(sample)), key=lambda i: lengths[i])
    mixed = order[:: -(-len(sample) // TEXT_BATCH)]
    rest = [i for i in order if i not in mixed]
    for numbers in [mixed, *_alike(rest, lengths)]:
        batch = tuple(sample[i] for i in numbers)
        (inputs,) = encode(batch)
        yield probe_of(spec, kind, inputs, f"{kind}s {', '.join(map(str, numbers))}", batch, mask_id)


def _alike(order: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split texts, sorted by length, into batches whose padding costs little more than another call."""
    batch: list[int] = []
    for i in order:
        padding = sum(lengths[i] - lengths[j] for j in batch)
        if batch and (len(batch) == TEXT_BATCH or padding > MAX_PADDING):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def pairs(spec: Spec, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (query, passage) pairs for models that distinguish segments, classify (re-rankers of RoBERTa's family have one token type) or
    answer questions: short texts with long ones, the first words of long texts with the whole text (which a re-ranker scores higher), and
    one text with itself and with an empty one."""
    if spec.token_types < 2 and spec.task not in ("question-answering", "text-classification"):
        return []
    order = sorted(dict.fromkeys(texts), key=len)
    step = max(1, len(order) // 2 // PAIRS)
    unlike = [(order[i], order[-1 - i]) for i in range(0, len(order) // 2, step)][:PAIRS]
    long = [words for words in map(str.split, order) if len(words) > 2 * QUERY_WORDS]
    own = [(" ".join(words[:QUERY_WORDS]), " ".join(words)) for words in long[:: max(1, -(-len(long) // RELEVANT))]]
    middle = order[len(order) // 2 : len(order) // 2 + 1]
    # What is sent where a passage was lost; a question has to have a context.
    lost = [(text, "") for text in middle if spec.task != "question-answering"]
    return [*unlike, *own, *((text, text) for text in middle), *lost]


def of_all_lengths(texts: Sequence[Text], lengths: Sequence[int]) -> list[Text]:
    """Return at most `END_TO_END_TEXTS` texts, evenly spread over their lengths, including the shortest and the longest."""
    order = np.argsort(lengths, kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(END_TO_END_TEXTS, len(order))).round().astype(int)
    return [texts[int(order[i])] for i in chosen]


def snippets(texts: Sequence[str]) -> list[str]:
    """Return up to `SNIPPETS` different short texts: one or two neighbouring words, taken evenly from all `texts`."""
    parts = [text.split() for text in texts]
    longest = max(map(len, parts), default=0)
    pairs = (" ".join(words[at : at + 2]) for at in range(longest) for words in parts if at < len(words))
    return list(islice(dict.fromkeys(pair for pair in pairs if len(pair) <= SNIPPET_LETTERS), SNIPPETS))


def timed(spec: Spec, inputs: Mapping[str, Array], name: str) -> Probe:
    """Return the probe of inputs that a stage ran while it was timed."""
    return probe_of(spec, "timed", dict(inputs), name)


def packable(spec: Spec, probe: Probe) -> bool:
    """Return whether a packed model computes the same for `probe` as a padded one.

    Packing removes padding. It differs where a head or pooling reads the first column and left padding is there: in a padded network that
    padding token attends to the text. (Where nothing reads that column, left padding is compared; see `Spec.left_padding_invariant`.)
    Packing also closes holes, which changes the distances between tokens: these matter to the relative positions of MPNet and DeBERTa and
    to windows (`_WINDOWED`). Absolute positions stay with their tokens.
    """
    if spec.family in ("mpnet", "deberta", "deberta-v2", *_WINDOWED):
        mask = probe.inputs["attention_mask"].astype(np.int8)
        if (np.diff(mask, axis=1, prepend=0) == 1).sum(axis=1).max(initial=0) > 1:
            return False
    if spec.granularity != "text" or spec.left_padding_invariant or spec.pooling not in (None, "cls"):
        return True
    return bool(probe.inputs["attention_mask"][probe.rows, 0].all())


def digest(probes: Sequence[Probe]) -> str:
    """Return a hash of every input, so that recorded figures are reused only for the same probes."""
    sha = hashlib.sha256()
    for probe in probes:
        sha.update(probe.name.encode())
        for name in sorted(probe.inputs):
            sha.update(probe.inputs[name].tobytes())
    return sha.hexdigest()


def probe_of(
    spec: Spec, padding: str, inputs: dict[str, Array], name: str | None = None, texts: tuple[Text, ...] = (), mask_id: int | None = None
) -> Probe:
    """Return a batch as a probe. For fill-mask, only a few tokens of each row are compared, those with the id `mask_id` first."""
    mask = inputs["attention_mask"].astype(bool)
    batch, sequence = mask.shape
    compared = mask.copy()
    if spec.task == "fill-mask":
        for row, ids in zip(compared, inputs["input_ids"], strict=True):
            asked = np.flatnonzero(row & (ids == (-1 if mask_id is None else mask_id)))[:WIDE_TOKENS]
            others = np.setdiff1d(np.flatnonzero(row), asked)
            spread = np.linspace(0, len(others) - 1, min(WIDE_TOKENS - len(asked), len(others))).astype(int)
            row[:] = False
            row[[*asked, *others[spread]]] = True
    rows = np.asarray(mask.any(axis=1))
    if spec.family in _WINDOWED and spec.granularity == "text" and not spec.left_padding_invariant:
        # Its windows are local: where the column that the head reads is padding, it may see no valid token at all,
        # which is as undefined as a fully masked row.
        rows &= mask[:, 0]
    return Probe(name or f"{batch} × {sequence}, {padding}", padding, inputs, compared, rows, texts)


def mask_of(padding: str, batch: int, sequence: int, rng: np.random.Generator) -> Array | None:
    """Return the attention mask [B, S] of a pattern, or None where the shape has no room for it."""
    mask = np.ones((batch, sequence), np.int64)
    columns = np.arange(sequence)
    # Each row another length, one of them full.
    lengths = np.maximum(1, sequence - np.arange(batch) * sequence // batch)[:, None]
    if batch == 1:
        lengths = np.array([[max(1, sequence * 2 // 3)]])
    if padding == "none":
        return mask
    if sequence == 1:
        return None
    if padding == "right":
        return (columns < lengths).astype(np.int64)
    if padding == "left":
        return (columns >= sequence - lengths).astype(np.int64)
    if padding == "holes":
        mask[:, 1:] = rng.random((batch, sequence - 1)) > 0.3
        return mask
    if padding == "one_token":
        return np.asarray((columns == 0) & np.ones((batch, 1), bool), np.int64)
    if batch == 1:
        return None
    mask[batch // 2] = 0
    return mask


def inputs_of(spec: Spec, mask: Array, padding: str, rng: np.random.Generator) -> dict[str, Array]:
    batch, sequence = mask.shape
    ids = spec.random_ids((batch, sequence), rng)
    if spec.dropped_id is not None:
        ids = mask_tokens.placed(spec, ids, mask, PADDINGS.index(padding), rng)
    if padding in ("right", "left", "masked_row"):
        ids[mask == 0] = spec.pad_id
    types = token_types.of_rows(spec, (batch, sequence), padding, rng)
    return spec.padded_inputs(ids, mask, types)
