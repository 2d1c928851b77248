"""The limits of a batch: those of the device and of the shapes that the form can run."""

from __future__ import annotations

from dataclasses import dataclass

from bertopt.core import Session, ShapeLimits, Spec

#: Most rows and most tokens (padding included) of a batch on a CPU.
MAX_BATCH, MAX_BATCH_TOKENS = 32, 8192
#: The same for a device to which work is launched, a GPU: it reaches its throughput only with batches that take longer than a launch.
LAUNCHED_BATCH, LAUNCHED_BATCH_TOKENS = 16_384, 65_536
#: Most tokens of a batch where each has an output over the vocabulary: with 30,000 entries they take 250 MB.
VOCABULARY_TOKENS = 2048
#: On a GPU, texts in the first piece of a call, and full batches in each later piece.
LAUNCHED_FIRST, PIECE_BATCHES = 2048, 2


def most_tokens(spec: Spec, launched: bool) -> int:
    """Return the most tokens of a batch, padding included, on a GPU (`launched`) or a CPU. A longer row is a batch by itself."""
    most = LAUNCHED_BATCH_TOKENS if launched else MAX_BATCH_TOKENS
    return min(most, VOCABULARY_TOKENS) if spec.over_vocabulary else most


@dataclass(frozen=True)
class BatchLimits:
    """Limits by which the texts of a call are planned."""

    rows: int
    """Most rows of a batch."""
    tokens: int
    """Most tokens of a batch."""
    length: int
    """Most tokens of a row."""
    streams: int = 1
    """Batches that run at once."""
    block: int = 1
    """Each text takes a multiple of this many tokens."""
    first_texts: int = 64
    """Texts in the first piece of a call. Each piece is planned by itself."""
    texts: int = 256
    """Most texts in each later piece."""
    together: int | None = None
    """About the most tokens in each later piece; None: no limit."""
    shapes: ShapeLimits | None = None
    """Further limits on rows, by their length."""
    buckets: tuple[int, ...] = ()
    """Row lengths for which the session has captured graphs, ascending; rows of other lengths run without a graph."""

    @classmethod
    def of(
        cls, session: Session, spec: Spec, shapes: ShapeLimits | None = None, tokens: int | None = None
    ) -> BatchLimits:
        """Return the limits of `session`'s device and of the `shapes` that its form runs, by default all up to the model's longest text;
        `tokens` overrides the device's."""
        rows, most = LAUNCHED_BATCH if session.asynchronous else MAX_BATCH, most_tokens(spec, session.asynchronous)
        length = spec.max_length if shapes is None else shapes.longest
        # A piece has enough short texts for several batches; the first is smaller, since the device waits for it.
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
        """Most texts of a call that are tokenised in one piece: waiting for 256 is fine on a CPU, but would leave a GPU idle."""
        return self.texts if self.together is None else self.first_texts

    def bucket(self, tokens: int) -> int:
        """Return the tokens that a row of `tokens` is padded to."""
        return next((size for size in self.buckets if size >= tokens), tokens)

    def most_rows(self, length: int) -> int:
        """Return the most rows of `length` tokens, at least 1, in a batch that the form runs."""
        most = None if self.shapes is None else self.shapes.most_rows(length)
        return self.rows if most is None else max(1, min(self.rows, most))
