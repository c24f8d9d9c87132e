"""Whether an answer is what its request must get. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
from msgspec import Struct

from embedsvc.bench.connection import Answer, ReplyError, read_reply
from embedsvc.intake import DEADLINE_RESERVE_S, DEADLINE_SHARE
from loadtest.chaos.plan import Visit
from loadtest.chaos.texts import Pool

# An answer may come so much later than its deadline.
GRACE_S = 0.25
# The server may give a request up once so much of the time is over that it works on it.
LEAST_TRIED = 0.9
# A deadline this short can be refused as one that even an idle server does not keep.
HOPELESS_S = 0.3
# A killed worker's connections end at once.
CUT_WITHIN_S = 2.0

_ID = re.compile(rb"\r\nx-request-id: *(\S+)\r", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *([1-9]|[1-5]\d|60)\r", re.IGNORECASE)
_NO_RETRY = re.compile(rb"\r\nx-should-retry: *false\r", re.IGNORECASE)
_INDEX = re.compile(r"\binput\[(\d+)\]")


class Verdict(StrEnum):
    """How a request ended. The last two may not happen."""

    RIGHT = "right"
    REFUSED = "refused"  # 429 that says when to come back
    UNAVAILABLE = "unavailable"  # 503 that says when to come back
    EXPIRED = "expired"  # 504
    HOPELESS = "hopeless"  # 400: the deadline is too short for these texts
    GUILTY = "guilty"  # 500 that names the text which breaks the model
    LEFT = "left"  # the client did not wait
    CUT = "cut"  # its worker was killed
    LOST = "lost"  # no answer
    WRONG = "wrong"  # any other answer


class Call(NamedTuple):
    """One request as its client saw it; times are seconds on one clock.

    Attributes:
        port: the client's end of the connection.
        sent: when its last byte was handed over.
        answered: when the answer was there, or began, for a client that reads slowly.
        deadline_s: what the server has, from `sent` on.
        verdict: how it ended.
        why: what is wrong with it.
        n_texts: of the request.
        poisoned: whether one of them breaks the model.
        retry_after_s: when its client is to come back, where the server cannot answer yet.
    """

    port: int
    sent: float
    answered: float
    deadline_s: float
    verdict: Verdict
    why: str = ""
    n_texts: int = 0
    poisoned: bool = False
    retry_after_s: float = 0.0


class _Error(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(Struct):
    error: _Error


_envelopes = msgspec.json.Decoder(_Envelope)


def judge(visit: Visit, request_id: str, answer: Answer, pool: Pool) -> tuple[Verdict, str]:
    """Return how a request ended that got this answer, and what is wrong with it."""
    found = _ID.search(answer.head)
    if found is None or found[1] != request_id.encode():
        return Verdict.WRONG, f"the answer of {found and found[1]!r}"
    if answer.status == 200:
        return _judge_vectors(visit, answer, pool)
    try:
        error = _envelopes.decode(answer.body).error
    except msgspec.DecodeError:
        return Verdict.WRONG, f"status {answer.status} without an error's envelope"
    if _allowed(visit, answer, error):
        return _OF_STATUS[answer.status], ""
    return Verdict.WRONG, f"status {answer.status}: {error.message}"


def told_to_wait_s(verdict: Verdict, answer: Answer) -> float:
    """Return when a client is to come back that cannot be answered yet.

    Those who are refused come back at once: a server must bear that.
    """
    found = _RETRY_AFTER.search(answer.head)
    return float(found[1]) if found is not None and verdict is Verdict.UNAVAILABLE else 0.0


def tried_s(visit: Visit, default_deadline_s: float) -> float:
    """Return the seconds for which a server must at least have tried before a request expires."""
    if visit.timeout_s is None:
        return LEAST_TRIED * default_deadline_s
    return LEAST_TRIED * max(0.0, DEADLINE_SHARE * visit.timeout_s - DEADLINE_RESERVE_S)


def _judge_vectors(visit: Visit, answer: Answer, pool: Pool) -> tuple[Verdict, str]:
    if visit.poison:
        return Verdict.WRONG, "vectors for a text that breaks the model"
    try:
        data = read_reply(answer.body, len(visit.picks), pool.vectors.shape[1]).data
    except ReplyError as error:
        return Verdict.WRONG, str(error)
    row = pool.first_wrong(visit.picks, [item.embedding for item in data])
    if row is not None:
        return Verdict.WRONG, f"row {row} of {len(visit.picks)} is not the vector of its text"
    return Verdict.RIGHT, ""


_OF_STATUS = {
    400: Verdict.HOPELESS,
    429: Verdict.REFUSED,
    500: Verdict.GUILTY,
    503: Verdict.UNAVAILABLE,
    504: Verdict.EXPIRED,
}


def _allowed(visit: Visit, answer: Answer, error: _Error) -> bool:
    """Say whether this request may get this error."""
    match answer.status:
        case 400:
            return visit.timeout_s is not None and visit.timeout_s <= HOPELESS_S
        case 429 | 503:
            return _RETRY_AFTER.search(answer.head) is not None
        case 500:
            named = _INDEX.search(error.message)
            final = _NO_RETRY.search(answer.head) is not None
            return final and named is not None and int(named[1]) in visit.poison
    return answer.status == 504


# --- what can only be said afterwards ------------------------------------------------------------


class Stall(NamedTuple):
    """Seconds in which the client itself did nothing, since its machine was busy."""

    start: float
    end: float


def late_s(call: Call, stalls: Sequence[Stall]) -> float:
    """Return by how many seconds an answer came too late, without those the client slept."""
    if call.verdict in (Verdict.LEFT, Verdict.CUT, Verdict.LOST):
        return 0.0
    due = call.sent + call.deadline_s + GRACE_S
    slept = sum(max(0.0, min(s.end, call.answered) - max(s.start, due)) for s in stalls)
    return max(0.0, call.answered - due - slept)


class Injected(NamedTuple):
    """A fault that was injected.

    Attributes:
        fault: its name.
        at: when.
        in_flight: requests that waited for their answers then.
        ports: clients' ends of connections it must have cut.
    """

    fault: str
    at: float
    in_flight: int
    ports: frozenset[int] = frozenset()


def set_apart(calls: Sequence[Call], faults: Sequence[Injected]) -> list[Call]:
    """Return the calls; those whose worker was killed are no longer lost, but cut."""
    return [
        call._replace(verdict=Verdict.CUT)
        if call.verdict is Verdict.LOST
        and any(
            f.at <= call.answered <= f.at + CUT_WITHIN_S and call.port in f.ports for f in faults
        )
        else call
        for call in calls
    ]


def recovery_s(calls: Sequence[Call], at: float) -> float | None:
    """Return the seconds until the first right answer to a request that was sent after a fault."""
    good = [c.answered for c in calls if c.verdict is Verdict.RIGHT and c.sent >= at]
    return min(good) - at if good else None
