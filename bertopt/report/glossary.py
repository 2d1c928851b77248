"""What the figures on the page mean, for readers who have only the page."""

from __future__ import annotations

from bertopt.results.timing import DEAD_BAND

MEANINGS = {
    "vs reference": "end-to-end speed-up over the checkpoint on real texts, tokenisation included, with its 95 % interval",
    "vs parent": "the same over the stage that this one was built from",
    "FASTER, SLOWER": f"the whole interval is above {1 + DEAD_BAND:g}, or below {1 - DEAD_BAND:g}",
    "NO DIFFERENCE": f"the whole interval is between {1 - DEAD_BAND:g} and {1 + DEAD_BAND:g}",
    "INCONCLUSIVE": "neither; the interval is too wide to tell",
    "head to head": "race between stages that may be the fastest, as their intervals over the checkpoint overlap; it decides `deliver: fastest`",
    "worst parity": "of the limits on parity, the one nearest to being missed: what was measured, and the limit",
    "texts/s": "real texts of natural length, tokenisation included; in a row of one shape, texts of that shape alone",
    "ms 8×128 and the like": "median time of one batch of 8 texts with 128 tokens, without copies and tokenisation",
    "p50, p90, p99 ms": "time that 50, 90 or 99 % of the runs kept; p99 needs 5,000 runs",
    "n": "runs that were timed",
    "MB": "size of the stage's files, 10⁶ bytes",
    "max_abs": "largest absolute difference of one output from the checkpoint's",
    "rel_l2": "length of the difference of all outputs of a case, over the length of the checkpoint's",
    "cosine_min, cosine_mean": "smallest and mean cosine between an output vector and the checkpoint's",
    "label flips": "outputs whose highest class is another than the checkpoint's",
    "compared": "outputs of a case that were compared",
    "padding": "where a batch was padded: on the right, on the left, in holes between tokens; text: real text",
    "logits[3, 1]": "the output with the largest difference: row 3 of the batch, class 1",
}
