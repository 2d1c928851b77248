"""What bounds a batch on a device."""

from __future__ import annotations

from dataclasses import dataclass

from bertopt.core import Session, Spec

#: Rows in one batch at most, and tokens, padding included, where the processor runs the model.
MAX_BATCH, MAX_BATCH_TOKENS = 32, 8192
#: The same for a device that a call launches, a GPU: its rate is reached only by batches that take longer than a launch.
LAUNCHED_BATCH, LAUNCHED_BATCH_TOKENS = 16_384, 65_536


@dataclass(frozen=True)
class BatchLimits:
    """Most rows of a batch, its tokens, and tokens of one row; batches that run at once; and the tokens of which each text
    takes a whole multiple. A call's texts are planned `texts` at a time, the first `first_texts` by themselves."""

    rows: int
    tokens: int
    length: int
    streams: int = 1
    block: int = 1
    first_texts: int = 64
    texts: int = 256

    @classmethod
    def of(
        cls, session: Session, spec: Spec, max_shape: tuple[int, int] | None, tokens: int | None = None
    ) -> BatchLimits:
        """Return the limits of `session`'s device, within the form's largest [B, S]; `tokens` overrides the device's."""
        most_rows, most_tokens = (
            (LAUNCHED_BATCH, LAUNCHED_BATCH_TOKENS) if session.asynchronous else (MAX_BATCH, MAX_BATCH_TOKENS)
        )
        rows, length = max_shape or (most_rows, spec.max_length)
        # Enough short texts for several batches; the first piece is smaller, since the device waits for it.
        together = {"first_texts": LAUNCHED_BATCH, "texts": 4 * LAUNCHED_BATCH} if session.asynchronous else {}
        return cls(
            min(rows, most_rows), most_tokens if tokens is None else tokens, length, session.streams, session.block, **together
        )
