"""What the clients ask for and when something breaks, all of it from one seed. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Poison = Literal["raise", "nan", "crash"]
Leave = Literal["close", "reset", "half-close"]

MOST_TEXTS = 2048
# Shares of calls with one text, with few, and with many.
ONE, FEW = 0.6, 0.35
MOST_OF_FEW = 64
# Deadlines that clients state, in seconds, each with its weight; None states none.
DEADLINES: dict[float | None, int] = {None: 30, 30.0: 30, 5.0: 20, 1.0: 14, 0.3: 4, 0.1: 1, 0.02: 1}


@dataclass(slots=True, frozen=True)
class Visit:
    """One request, and how its client behaves.

    Attributes:
        picks: the text of each row, as an index of the pool.
        poison: rows whose text breaks the model instead, and how.
        timeout_s: deadline it states.
        floats: whether it asks for JSON numbers.
        fresh: whether it comes on a new connection.
        pause_s: wait before it.
        upload_pauses_s: the upload rests so long after each piece; empty sends it at once.
        slow_reader: takes the answer in small pieces, with rests.
        leave_after_s: hangs up after so long; None waits for the answer.
        leave: how.
    """

    picks: Sequence[int]
    poison: dict[int, Poison] = field(default_factory=dict)
    timeout_s: float | None = None
    floats: bool = False
    fresh: bool = False
    pause_s: float = 0.0
    upload_pauses_s: Sequence[float] = ()
    slow_reader: bool = False
    leave_after_s: float | None = None
    leave: Leave = "close"


@dataclass(slots=True, frozen=True)
class Habits:
    """What differs between runs.

    Attributes:
        n_pool: texts to pick from.
        most_texts: of one request.
        poison: in what ways texts break this model; empty for none.
        poison_share: of the calls that have a poisoned text.
        mean_pause_s: between an answer and the next request.
    """

    n_pool: int
    most_texts: int = MOST_TEXTS
    poison: Sequence[Poison] = ("raise", "nan")
    poison_share: float = 0.01
    mean_pause_s: float = 0.05


def visits(seed: int, user: int, habits: Habits) -> Iterator[Visit]:
    """Yield the visits of one user, without end; the same for the same seed and user."""
    rng = random.Random(f"{seed} {user}")
    while True:
        yield _visit(rng, habits)


def _visit(rng: random.Random, habits: Habits) -> Visit:
    n_texts = n_texts_of(rng, habits.most_texts)
    poison: dict[int, Poison] = {}
    if habits.poison and rng.random() < habits.poison_share:
        poison = {rng.randrange(n_texts): rng.choice(habits.poison)}
    slow_upload = rng.random() < 0.03
    return Visit(
        picks=[rng.randrange(habits.n_pool) for _ in range(n_texts)],
        poison=poison,
        timeout_s=rng.choices(list(DEADLINES), list(DEADLINES.values()))[0],
        floats=n_texts <= MOST_OF_FEW and rng.random() < 0.1,
        fresh=rng.random() < 0.1,
        pause_s=rng.expovariate(1) * habits.mean_pause_s,
        upload_pauses_s=[rng.uniform(0, 0.3) for _ in range(8)] if slow_upload else (),
        slow_reader=rng.random() < 0.05,
        leave_after_s=rng.expovariate(1 / 0.1) if rng.random() < 0.08 else None,
        leave=rng.choice(("close", "reset", "half-close")),
    )


def n_texts_of(rng: random.Random, most: int) -> int:
    """Return the number of texts of a call: mostly one, at times few, every now and then many."""
    kind = rng.random()
    if kind < ONE or most == 1:
        return 1
    few = min(MOST_OF_FEW, most)
    low, high = (1, few) if kind < ONE + FEW else (few, most)
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


@dataclass(slots=True, frozen=True)
class Planned:
    """A fault to come.

    Attributes:
        at: seconds since the first one.
        fault: its name.
    """

    at: float
    fault: str


def schedule(seed: int, faults: Sequence[str], *, end: float, mean_gap_s: float) -> list[Planned]:
    """Return faults from now to `end`, each as often as the others, give or take one.

    Gaps are anything from a moment to twice their mean, so that some faults meet before the server
    has recovered from the one before.
    """
    rng = random.Random(f"{seed} faults")
    planned: list[Planned] = []
    at = 0.0
    while faults:
        for fault in rng.sample(faults, len(faults)):
            if at > end:
                return planned
            planned.append(Planned(at, fault))
            at += rng.uniform(0.1, 2 * mean_gap_s)
    return planned
