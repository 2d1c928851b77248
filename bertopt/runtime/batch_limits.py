"""What bounds a batch: the device's limits and the shapes that the form runs."""

from __future__ import annotations

from dataclasses import dataclass

from bertopt.core import Session, ShapeLimits, Spec

#: Most rows of a batch, and most tokens, padding included, where the processor runs the model.
MAX_BATCH, MAX_BATCH_TOKENS = 32, 8192
#: The same for a device that a call launches, a GPU: its rate is reached only by batches that take longer than a launch.
LAUNCHED_BATCH, LAUNCHED_BATCH_TOKENS = 16_384, 65_536
#: Most tokens of a batch where each has an output over the vocabulary: with 30,000 words those take 250 MB.
VOCABULARY_TOKENS = 2048
#: Texts of its first piece, and full batches in each of the others.
LAUNCHED_FIRST, PIECE_BATCHES = 2048, 2


def most_tokens(spec: Spec, launched: bool) -> int:
    """Return the most tokens of a batch, padding included, of a device that a call launches or of a processor; a longer row is one."""
    most = LAUNCHED_BATCH_TOKENS if launched else MAX_BATCH_TOKENS
    return min(most, VOCABULARY_TOKENS) if spec.task == "fill-mask" else most


@dataclass(frozen=True)
class BatchLimits:
    """Most rows of a batch, its tokens, and tokens of one row; batches that run at once; and the tokens of which each text
    takes a whole multiple. A call's texts are planned `texts` at a time, or about as many as have `together` tokens where these
    are fewer, the first `first_texts` by themselves. `shapes` bounds the rows further, by their length."""

    rows: int
    tokens: int
    length: int
    streams: int = 1
    block: int = 1
    first_texts: int = 64
    texts: int = 256
    together: int | None = None
    shapes: ShapeLimits | None = None
    buckets: tuple[int, ...] = ()
    """Tokens of the rows that the session has graphs of, ascending; others are run without."""

    @classmethod
    def of(
        cls, session: Session, spec: Spec, shapes: ShapeLimits | None = None, tokens: int | None = None
    ) -> BatchLimits:
        """Return the limits of `session`'s device and of the `shapes` that its form runs, by default all up to the model's
        longest text; `tokens` overrides the device's."""
        rows, most = LAUNCHED_BATCH if session.asynchronous else MAX_BATCH, most_tokens(spec, session.asynchronous)
        length = spec.max_length if shapes is None else shapes.longest
        # Enough short texts for several batches; the first piece is smaller, since the device waits for it.
        pieces = (
            {"first_texts": LAUNCHED_FIRST, "texts": 4 * LAUNCHED_BATCH, "together": PIECE_BATCHES * most}
            if session.asynchronous
            else {}
        )
        return cls(
            rows, most if tokens is None else tokens, length, session.streams, session.block, **pieces,
            shapes=shapes, buckets=session.buckets,
        )  # fmt: skip

    @property
    def one_piece(self) -> int:
        """Texts of a call that are tokenised at once: a processor waits for 256, a GPU would stand still."""
        return self.texts if self.together is None else self.first_texts

    def bucket(self, tokens: int) -> int:
        """Return the tokens that a row of `tokens` is padded to."""
        return next((size for size in self.buckets if size >= tokens), tokens)

    def most_rows(self, length: int) -> int:
        """Return the most rows of `length` tokens, at least 1, in a batch that the form runs."""
        most = None if self.shapes is None else self.shapes.most_rows(length)
        return self.rows if most is None else max(1, min(self.rows, most))
