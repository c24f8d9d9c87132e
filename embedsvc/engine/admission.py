"""Admission: bounds on what may wait, reserved before any work is done for it.

Lives on the event loop; knows nothing of threads.
"""

from __future__ import annotations

from embedsvc.errors import Overloaded

# The share of each bound that bulk requests may hold, so that an upload never fills the queue.
BULK_SHARE = 0.75
# A request is admitted while its predicted end is within this share of the time it has: later
# arrivals may overtake it, and predictions err. At four times the sustainable rate of mixed lengths
# 0.5 loses 0.4 % of the admitted to their deadline when simulated and 1.2 % when served; 0.7 loses
# 10 % and 1.0 25 % when simulated.
PROMISED_SHARE = 0.4
# Rows older than the age cap go oldest first, so a long time is shortened by the cap and by what
# predictions err: simulated with batches a fifth slower than predicted, none of the admitted is
# lost with 0.8 and 1.3 % with 0.9.
PROMISED_LONG_SHARE = 0.8


def promised_s(left_s: float, max_age_s: float) -> float:
    """Return by when a request must be predicted to end to be admitted, in seconds.

    Args:
        left_s: seconds until its deadline.
        max_age_s: wait after which rows go oldest first.
    """
    return max(PROMISED_SHARE * left_s, PROMISED_LONG_SHARE * left_s - max_age_s)


class Admission:
    """Counts of admitted sequences and tokens against their bounds."""

    def __init__(self, max_sequences: int, max_tokens: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.sequences = 0
        self.tokens = 0

    def reserve(self, sequences: int, tokens: int, *, bulk: bool) -> None:
        """Take room for one request, all or nothing.

        Args:
            sequences: rows of the request.
            tokens: their tokens, estimated; corrected by `adjust` once they are known.
            bulk: whether only the bulk share of the bounds may be used.

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
                    f"{' for bulk requests' if bulk else ''}. Retry after the time given."
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
