"""How many users there are at each moment of a locust run. Pure; knows nothing of locust."""

from __future__ import annotations

import math
from typing import Literal, get_args

Shape = Literal["steady", "spike", "soak"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

# Outside its spike a spike run has this share of the users.
CALM_SHARE = 0.2
SPIKE = (1 / 3, 1 / 2)
# A soak run grows for this share of its time.
RAMP_SHARE = 0.1


def users_at(shape: Shape, at: float, n_users: int) -> int:
    """Return the number of users at a moment.

    Args:
        shape: `steady`: all the time all users. `spike`: a fifth of them, but all from the third to
            the half of the run. `soak`: from few to all during the first tenth, then all.
        at: how much of the run is over, 0 to 1.
        n_users: the most users.
    """
    if shape == "spike":
        start, stop = SPIKE
        return n_users if start <= at < stop else math.ceil(n_users * CALM_SHARE)
    if shape == "soak":
        return math.ceil(n_users * min(1.0, max(at, 0.01) / RAMP_SHARE))
    return n_users
