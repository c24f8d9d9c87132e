"""Admission: bounds on what may wait, reserved before any work is done for it.

Lives on the event loop; knows nothing of threads or time.
"""

from __future__ import annotations

from embedsvc.errors import Overloaded

# The share of each bound that bulk requests may hold, so that an upload never fills the queue.
BULK_SHARE = 0.75
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Admission:
    """Counts of admitted sequences and tokens against their bounds."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0

    def reserve(self, sequences: int, tokens: int, *, bulk: bool, drain_s: float) -> None:
        """Take room for one request, all or nothing.

        Args:
            sequences: rows of the request.
            tokens: their tokens, estimated; corrected by `adjust` once they are known.
            bulk: whether only the bulk share of the bounds may be used.
            drain_s: predicted seconds until what is admitted now is done, told to the refused.

        Raises:
            Overloaded: a bound would be passed.
        """
        share = BULK_SHARE if bulk else 1.0
        for name, held, asked, bound in (
            ("max_queue_sequences", self.sequences, sequences, self.max_sequences * share),
            ("max_queue_tokens", self.tokens, tokens, self.max_tokens * share),
        ):
            if held + asked > bound:
                raise Overloaded(
                    f"The queue is full: {held} held and {asked} asked, {name} is {bound:.0f}"
                    f"{' for bulk requests' if bulk else ''}. Retry after the time given.",
                    retry_after_s=min(max(drain_s, MIN_RETRY_S), MAX_RETRY_S),
                )
        self.sequences += sequences
        self.tokens += tokens

    def adjust(self, tokens: int) -> None:
        """Add the difference between real and estimated tokens of an admitted request."""
        self.tokens += tokens

    def release(self, sequences: int, tokens: int) -> None:
        """Give room back."""
        self.sequences -= sequences
        self.tokens -= tokens
