"""What is looked at before a request is tokenized, how long that may take, and what it becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from collections.abc import Sequence as Seq
from time import monotonic
from typing import TypeVar

import numpy as np

from embedsvc.config import ServerConfig
from embedsvc.engine.sequence import Key, Priority, Request, Sequence
from embedsvc.errors import DeadlineExceeded, InvalidRequest
from embedsvc.tokenization import Encoded

T = TypeVar("T")

# The answer must arrive before the client gives up: a share of its time, less a fixed reserve.
DEADLINE_SHARE, DEADLINE_RESERVE_S = 0.95, 0.05
# A request that states no deadline gets at least this many times its own predicted time.
OWN_TIME_FACTOR = 3.0
# Longer texts are refused: far beyond any model, and what has no white space is tokenized whole.
MAX_TEXT_LENGTH = 1_000_000
# Tokenizing estimates from here on is bounded by the deadline.
TIMED_TOKENS = 1_000
# Estimate used before tokenization.
CHARACTERS_PER_TOKEN = 4


def time_s(server: ServerConfig, stated_s: float | None, own_s: float = 0.0) -> float:
    """Return the seconds a request has.

    Args:
        server: its limits.
        stated_s: seconds the client says it waits; None takes the server's default.
        own_s: its predicted seconds on the idle server.
    """
    if stated_s is None:
        return max(server.timeout_s, OWN_TIME_FACTOR * own_s)
    return DEADLINE_SHARE * min(stated_s, server.max_timeout_s) - DEADLINE_RESERVE_S


async def before(deadline: float, encoding: Awaitable[T], tokens: int) -> T:
    """Wait for the tokenizer until the deadline; few tokens take no time worth a timer.

    Raises:
        DeadlineExceeded: it passed first.
    """
    if tokens < TIMED_TOKENS:
        return await encoding
    try:
        async with asyncio.timeout(max(0.0, deadline - monotonic())):
            return await encoding
    except TimeoutError:
        raise DeadlineExceeded(
            "The deadline passed while the texts were tokenized. Send less text at once."
        ) from None


def check_sizes(inputs: list[str] | list[list[int]]) -> None:
    """Refuse texts that are longer than anybody's model.

    Raises:
        InvalidRequest: one is; the message says which.
    """
    for index, one in enumerate(inputs):
        if len(one) > MAX_TEXT_LENGTH:
            raise InvalidRequest(
                f"input[{index}] has {len(one)} characters or ids, at most {MAX_TEXT_LENGTH} are "
                "read. Split it.",
                param="input",
            )


def estimate_tokens(inputs: list[str] | list[list[int]], max_length: int) -> int:
    """Return about how many tokens the inputs will have, each cut to `max_length`."""
    divisor = CHARACTERS_PER_TOKEN if isinstance(inputs[0], str) else 1
    return sum(min(max_length, 2 + len(one) // divisor) for one in inputs)


def request_of(
    encoded: Seq[Encoded], dim: int, deadline: float, priority: Priority, key: Key
) -> tuple[Request, list[Sequence]]:
    """Return tokenized texts as a request that arrives now, and its sequences."""
    request = Request(
        vectors=np.empty((len(encoded), dim), np.float32),
        deadline=deadline,
        arrival=monotonic(),
        priority=priority,
        settled=asyncio.get_running_loop().create_future(),
        key=key,
    )
    return request, [Sequence(request, i, e.ids, e.prompt_length) for i, e in enumerate(encoded)]
