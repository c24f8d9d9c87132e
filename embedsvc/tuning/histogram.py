"""Lengths of texts: all since the start, and recent ones, older counting less. Pure; one owner."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]

# Texts after which a text counts half. Counted in texts, not in time, so that a quiet hour forgets
# nothing and a busy minute is enough to follow a change.
HALF_LIFE_TEXTS = 2_000
# 2^32 divided by the golden ratio; bit 15 of its multiples has no short period.
# Source: multiplicative hashing, Knuth, The Art of Computer Programming 3, section 6.4.
_SCATTER = 0x9E3779B1


class LengthHistogram:
    """Texts by length: all of them, and a decayed count kept in two halves.

    Edges fitted to one half can be judged on the other. Which half a text goes to depends on its
    number alone, but not in turns: queries and documents often alternate.

    Lists, because adding to one item of an array takes four times as long.

    Args:
        max_length: longest text in tokens.
        half_life_texts: texts after which a text counts half.

    Attributes:
        totals: texts since the start by length, `max_length + 1` items.
        n_seen: their number.
    """

    def __init__(self, max_length: int, half_life_texts: float = HALF_LIFE_TEXTS) -> None:
        self.max_length = max_length
        self.n_seen = 0
        self.totals = [0] * (max_length + 1)
        # Newer texts get growing weights instead of older ones shrinking: one addition a text.
        self._growth = 2.0 ** (1.0 / half_life_texts)
        self._weight = 1.0
        self._halves = ([0.0] * (max_length + 1), [0.0] * (max_length + 1))

    def add(self, lengths: Iterable[int]) -> None:
        """Count texts of some tokens each."""
        for length in lengths:
            self._halves[self.n_seen * _SCATTER >> 15 & 1][length] += self._weight
            self._weight *= self._growth
            self.n_seen += 1
            self.totals[length] += 1
        if self._weight > 1e12:
            for half in self._halves:
                half[:] = [count / self._weight for count in half]
            self._weight = 1.0

    def halves(self) -> tuple[Counts, Counts]:
        """Return copies of both halves, `(max_length + 1,) float64`, in units of a new text."""
        one, other = self._halves
        return np.array(one) / self._weight, np.array(other) / self._weight

    def counts(self) -> Counts:
        """Return both halves together, `(max_length + 1,) float64`."""
        one, other = self.halves()
        return one + other
