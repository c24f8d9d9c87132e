"""How long to wait before a process that died is started again. Pure."""

from __future__ import annotations

# One that lived longer has died of something new.
STABLE_S = 60.0
MOST_S = 30.0


class Backoff:
    """Pauses of 0, 1, 2, 4, … seconds up to `MOST_S`, from 0 again after a long life."""

    def __init__(self) -> None:
        self._deaths = 0

    def pause_s(self, lived_s: float) -> float:
        """Return the pause after a death.

        Args:
            lived_s: how long it was ready.
        """
        self._deaths = 1 if lived_s >= STABLE_S else self._deaths + 1
        return min(MOST_S, 2.0 ** (self._deaths - 2)) if self._deaths > 1 else 0.0
