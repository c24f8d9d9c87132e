"""Texts that ended a model's process: refused for a while, so that nobody pays for them again.

Device threads add, the event loop and the device threads look; a table of digests, no ids and no
texts.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

from embedsvc.engine.sequence import Sequence
from embedsvc.errors import InferenceFailed
from embedsvc.models.buffers import Ids

log = logging.getLogger(__name__)

QUARANTINE_S = 600.0
# The oldest leave for new ones: an attacker fills his own places.
MAX_TEXTS = 1024


class Quarantine:
    """The texts that are refused now.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Until when, by digest, in the order in which they came. Each change is one operation on
        # the dictionary, which threads see whole.
        self._until: dict[bytes, float] = {}

    def add(self, row: Sequence) -> None:
        """Refuse a text from now on."""
        while len(self._until) >= MAX_TEXTS:
            self._until.pop(next(iter(self._until)), None)
        self._until[_digest(row.input_ids)] = self._clock() + QUARANTINE_S
        log.error(
            "a text ended the model's process, refused from now on index=%d tokens=%d seconds=%.0f",
            row.row, row.length, QUARANTINE_S,
        )  # fmt: skip

    def refusal(self, rows: Iterable[Sequence]) -> tuple[Sequence, InferenceFailed] | None:
        """Return the first row that is refused and the answer to its request; None if none is."""
        # Nearly always there is nothing to look up, and then nothing is hashed.
        if self._until:
            now = self._clock()
            for row in rows:
                if self._until.get(_digest(row.input_ids), now) > now:
                    return row, _refused(row.row)
        return None


def _digest(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _refused(row: int) -> InferenceFailed:
    return InferenceFailed(
        f"input[{row}] ended the model's process a short time ago and is not tried again for now. "
        "Leave this text out; the server's log says more.",
        param="input",
    )
