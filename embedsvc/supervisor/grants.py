"""Who may run a batch on a device that several workers share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

W = TypeVar("W", bound=Hashable)


class Answer(NamedTuple, Generic[W]):
    """What comes of a wish for slots.

    Attributes:
        who: had it.
        granted: whether the slots are theirs now; False where the wish was taken back in time.
        free: slots that nobody has now.
        contenders: how many have or want slots.
    """

    who: W
    granted: bool
    free: int
    contenders: int


class Grants(Generic[W]):
    """The slots of a device, granted first come first served.

    Everyone has at most one open wish. All methods return the answers that are due now.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_slots = self._free = n_slots
        # How many slots each one wants, in the order of asking.
        self._wanting: dict[W, int] = {}
        self._held: Counter[W] = Counter()

    def want(self, who: W) -> list[Answer[W]]:
        """Note a wish for a slot."""
        self._wanting[who] = 1
        return self._grant()

    def want_all(self, who: W) -> list[Answer[W]]:
        """Note a wish for all slots at once, from one who has none; those behind it wait too."""
        self._wanting[who] = self._n_slots
        return self._grant()

    def cancel(self, who: W) -> list[Answer[W]]:
        """Take a wish back; one that has been granted stays granted, which its holder finds out."""
        if self._wanting.pop(who, None) is None:
            return []
        return [self._answer(who, granted=False), *self._grant()]

    def release(self, who: W) -> list[Answer[W]]:
        """Give a slot back."""
        assert self._held[who] > 0
        self._held[who] -= 1
        self._free += 1
        return self._grant()

    def leave(self, who: W) -> list[Answer[W]]:
        """Take back all that somebody has or wants who is gone."""
        self._wanting.pop(who, None)
        self._free += self._held.pop(who, 0)
        return self._grant()

    def _grant(self) -> list[Answer[W]]:
        granted = []
        while self._wanting and self._free >= (n := next(iter(self._wanting.values()))):
            who = next(iter(self._wanting))
            del self._wanting[who]
            self._free -= n
            self._held[who] += n
            granted.append(self._answer(who, granted=True))
        return granted

    def _answer(self, who: W, *, granted: bool) -> Answer[W]:
        contenders = {w for w, n in self._held.items() if n} | self._wanting.keys()
        return Answer(who, granted, self._free, len(contenders))
