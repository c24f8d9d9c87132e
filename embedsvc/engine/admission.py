"""Admission: bounds on what may wait, reserved before any work is done for it.

Lives on the event loop; knows nothing of threads.
"""

from __future__ import annotations

from embedsvc.engine.sequence import NO_KEY, Key
from embedsvc.errors import Overloaded

# The share of each bound that bulk requests may hold, so that an upload never fills the queue.
BULK_SHARE = 0.75
# A key may hold so many times the room that it leaves: a quarter of the queue is left by one alone,
# a quarter of that by the next.
# Source: A. K. Choudhury, E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet
# switches", IEEE/ACM Transactions on Networking 6, 1998.
KEY_SHARE = 3
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
        # The same by key.
        self._held: dict[Key, tuple[int, int]] = {}

    def reserve(self, sequences: int, tokens: int, *, bulk: bool, key: Key = NO_KEY) -> None:
        """Take room for one request, all or nothing; where nobody holds any, all of it is free.

        Args:
            sequences: rows of the request.
            tokens: their tokens, estimated; corrected by `adjust` once they are known.
            bulk: whether only the bulk share of the bounds may be used.
            key: whom it counts for.

        Raises:
            Overloaded: a bound would be passed, or too little room be left for other keys.
        """
        share = BULK_SHARE if bulk and self.sequences else 1.0
        own_sequences, own_tokens = self._held.get(key, (0, 0))
        for name, held, own, asked, bound in (
            ("max_queue_sequences", self.sequences, own_sequences, sequences, self.max_sequences),
            ("max_queue_tokens", self.tokens, own_tokens, tokens, self.max_tokens),
        ):
            if held + asked > bound * share:
                raise Overloaded(
                    f"The queue is full: {held} held and {asked} asked, {name} is "
                    f"{bound * share:.0f}{' for bulk requests' if bulk else ''}. "
                    "Retry after the time given."
                )
            if key is not NO_KEY and held and own + asked > KEY_SHARE * (bound - held - asked):
                raise Overloaded(
                    f"Your key fills the queue: {own} held by it, {asked} asked, {held} held by "
                    f"all, {name} is {bound}. Retry after the time given."
                )
        self._add(key, sequences, tokens)

    def adjust(self, tokens: int, key: Key = NO_KEY) -> None:
        """Add the difference between real and estimated tokens of an admitted request."""
        self._add(key, 0, tokens)

    def release(self, sequences: int, tokens: int, key: Key = NO_KEY) -> None:
        """Give room back."""
        self._add(key, -sequences, -tokens)

    def _add(self, key: Key, sequences: int, tokens: int) -> None:
        self.sequences += sequences
        self.tokens += tokens
        own_sequences, own_tokens = self._held.get(key, (0, 0))
        self._held[key] = own_sequences + sequences, own_tokens + tokens
        if self._held[key] == (0, 0):
            del self._held[key]
