"""Lengths of recent texts, older ones counting less. Pure; one owner."""

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
    """A decayed count of texts by length, kept in two halves.

    Edges fitted to one half can be judged on the other. Which half a text goes to depends on its
    number alone, but not in turns: queries and documents often alternate.

    Args:
        max_length: longest text in tokens.
        half_life_texts: texts after which a text counts half.
    """

    def __init__(self, max_length: int, half_life_texts: float = HALF_LIFE_TEXTS) -> None:
        self.max_length = max_length
        self.n_seen = 0
        # Newer texts get growing weights instead of older ones shrinking: one addition a text.
        self._growth = 2.0 ** (1.0 / half_life_texts)
        self._weight = 1.0
        self._halves = (np.zeros(max_length + 1), np.zeros(max_length + 1))

    def add(self, lengths: Iterable[int]) -> None:
        """Count texts of some tokens each."""
        for length in lengths:
            self._halves[self.n_seen * _SCATTER >> 15 & 1][length] += self._weight
            self._weight *= self._growth
            self.n_seen += 1
        if self._weight > 1e12:
            for half in self._halves:
                half /= self._weight
            self._weight = 1.0

    def halves(self) -> tuple[Counts, Counts]:
        """Return copies of both halves, `(max_length + 1,) float64`, in units of a new text."""
        one, other = self._halves
        return one / self._weight, other / self._weight

    def counts(self) -> Counts:
        """Return both halves together, `(max_length + 1,) float64`."""
        one, other = self.halves()
        return one + other
