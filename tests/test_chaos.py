"""Chaos: plan, checker and table; users of a server that misbehaves; a short run."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.bench.connection import Answer
from embedsvc.config import DEFAULT_SOURCE
from embedsvc.models.buffers import Vectors
from embedsvc.models.source import resolve
from embedsvc.tokenization import Tokenizer
from loadtest.census import Census, census
from loadtest.chaos.__main__ import Outcome
from loadtest.chaos.__main__ import judge as judge_run
from loadtest.chaos.checker import (
    GRACE_S,
    Call,
    Injected,
    Stall,
    Verdict,
    judge,
    late_s,
    recovery_s,
    set_apart,
    told_to_wait_s,
    tried_s,
)
from loadtest.chaos.client import Run, User
from loadtest.chaos.faults import Target, kill_model, kill_worker, kill_workers, stop_model
from loadtest.chaos.faulty import WORDS
from loadtest.chaos.plan import Habits, Leave, Visit, schedule, visits
from loadtest.chaos.report import report
from loadtest.chaos.texts import Pool
from tests.wire import Answering, listening

ID = "user1-7"
POOL = Pool(["a", "b", "c"], np.eye(3, 4, dtype=np.float32), exact=True)
NEARLY = Pool(POOL.texts, POOL.vectors, exact=False)
ABC = Visit(picks=[0, 1, 2])
BAD_B = Visit(picks=[0, 1, 2], poison={1: "raise"})
HASTY = Visit(picks=[0], timeout_s=0.1)


def vectors(*picks: int, pool: Pool = POOL, floats: bool = False) -> bytes:
    """Return the body of a reply with the vectors of these texts."""
    rows = [pool.vectors[pick] for pick in picks]
    data = [
        {"embedding": row.tolist() if floats else written(row), "index": index}
        for index, row in enumerate(rows)
    ]
    return msgspec.json.encode({"data": data, "usage": {"prompt_tokens": 3}})


def written(row: Vectors) -> str:
    """Return a vector in base64."""
    return base64.b64encode(row.tobytes()).decode()


def error(message: str = "no") -> bytes:
    """Return the body of an error."""
    return json.dumps(
        {"error": {"message": message, "type": "t", "param": None, "code": None}}
    ).encode()


def answer(status: int, body: bytes, *headers: str, request_id: str = ID) -> Answer:
    """Return an answer as a client reads it."""
    lines = [f"HTTP/1.1 {status} Some", f"x-request-id: {request_id}", *headers, ""]
    return Answer(status, "\r\n".join(lines).encode(), body)


# --- the checker ---------------------------------------------------------------------------------

AFTER_7, FINAL = "Retry-After: 7", "x-should-retry: false"


@pytest.mark.parametrize(
    ("visit", "given", "verdict"),
    [
        (ABC, answer(200, vectors(0, 1, 2)), Verdict.RIGHT),
        (ABC, answer(200, vectors(0, 1, 2, floats=True)), Verdict.RIGHT),
        (HASTY, answer(200, vectors(0)), Verdict.RIGHT),
        (ABC, answer(429, error(), AFTER_7), Verdict.REFUSED),
        (ABC, answer(503, error(), AFTER_7), Verdict.UNAVAILABLE),
        (ABC, answer(504, error()), Verdict.EXPIRED),
        (HASTY, answer(400, error()), Verdict.HOPELESS),
        (BAD_B, answer(500, error("on input[1]."), FINAL), Verdict.GUILTY),
        (BAD_B, answer(503, error(), AFTER_7), Verdict.UNAVAILABLE),
    ],
)
def test_what_a_request_may_get(visit: Visit, given: Answer, verdict: Verdict) -> None:
    """Its vectors, a refusal that says when to come back, or the error that is its own fault."""
    assert judge(visit, ID, given, POOL) == (verdict, "")


@pytest.mark.parametrize(
    ("visit", "given", "why"),
    [
        (ABC, answer(200, vectors(0, 2, 1)), "row 1 of 3 is not"),
        (ABC, answer(200, vectors(0, 1)), "2 vectors for 3"),
        (ABC, answer(200, vectors(0, 1, 2)[:-9]), "not an embeddings reply"),
        (ABC, answer(200, vectors(0, 1, 2), request_id="user1-6"), "the answer of b'user1-6'"),
        (BAD_B, answer(200, vectors(0, 1, 2)), "a text that breaks the model"),
        (ABC, answer(500, error("on input[1]."), FINAL), "status 500: on input"),
        (BAD_B, answer(500, error("on input[2]."), FINAL), "status 500"),
        (BAD_B, answer(500, error("on input[11]."), FINAL), "status 500"),
        (BAD_B, answer(500, error("on input[1].")), "status 500"),
        (ABC, answer(400, error()), "status 400"),
        (ABC, answer(429, error()), "status 429"),
        (ABC, answer(503, error(), "Retry-After: 0"), "status 503"),
        (ABC, answer(503, b"<html>", AFTER_7), "without an error's envelope"),
        (ABC, answer(502, error(), AFTER_7), "status 502"),
    ],
)
def test_what_no_request_may_get(visit: Visit, given: Answer, why: str) -> None:
    """Other vectors, somebody else's answer, blame without guilt, silence about the time."""
    verdict, said = judge(visit, ID, given, POOL)

    assert verdict is Verdict.WRONG
    assert why in said


def test_a_real_model_may_differ_a_little() -> None:
    """Its vectors depend on their company in the last bits; another direction is still wrong."""
    turned = POOL.vectors + np.float32(0.005)
    off = POOL.vectors + np.float32(0.05)
    for moved, expected in ((turned, Verdict.RIGHT), (off, Verdict.WRONG)):
        body = vectors(0, 1, 2, pool=Pool(POOL.texts, moved, exact=False))

        assert judge(ABC, ID, answer(200, body), NEARLY)[0] is expected
        assert judge(ABC, ID, answer(200, body), POOL)[0] is Verdict.WRONG


def test_clients_that_cannot_be_answered_yet_are_told_when_to_come_back() -> None:
    """Those who are refused come back at once."""
    unavailable, refused = answer(503, error(), AFTER_7), answer(429, error(), AFTER_7)

    assert told_to_wait_s(Verdict.UNAVAILABLE, unavailable) == 7
    assert told_to_wait_s(Verdict.REFUSED, refused) == 0
    assert told_to_wait_s(Verdict.RIGHT, answer(200, vectors(0))) == 0


def test_a_server_keeps_some_of_a_stated_deadline_back() -> None:
    """It tries for the rest; a deadline that leaves none may expire at once."""
    assert tried_s(ABC, 20.0) == pytest.approx(0.9 * 20)
    assert tried_s(replace(ABC, timeout_s=1.0), 20.0) == pytest.approx(0.9 * 0.9)
    assert tried_s(replace(ABC, timeout_s=0.02), 20.0) == 0


def call(sent: float, answered: float, verdict: Verdict = Verdict.RIGHT, port: int = 1) -> Call:
    """Return a call with a deadline of a second."""
    return Call(port, sent, answered, 1.0, verdict)


def test_an_answer_after_the_deadline_is_late() -> None:
    """After a moment's grace, whatever it says; who gets none or did not wait is not late too."""
    assert late_s(call(0, 1 + GRACE_S), []) == 0
    assert late_s(call(0, 2), []) == pytest.approx(0.75)
    assert late_s(call(0, 2, Verdict.REFUSED), []) == pytest.approx(0.75)
    for verdict in (Verdict.LOST, Verdict.LEFT, Verdict.CUT):
        assert late_s(call(0, 9, verdict), []) == 0


@given(
    st.floats(0, 5),
    st.lists(st.floats(0, 6), min_size=2, max_size=8, unique=True).map(sorted),
)
def test_what_the_client_slept_is_not_held_against_the_server(
    answered: float, ends: list[float]
) -> None:
    """Every second of lateness counts in which the client was awake, and no other."""
    stalls = [Stall(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    one = call(0, answered)
    plain = late_s(one, [])
    slept = sum(max(0.0, min(s.end, answered) - max(s.start, 1 + GRACE_S)) for s in stalls)

    assert late_s(one, stalls) == pytest.approx(max(0.0, plain - slept))
    assert late_s(one, [Stall(0, 9)]) == 0


def test_a_killed_worker_cuts_its_own_connections_only() -> None:
    """Of the lost calls those on its connections, at that moment; everything else is lost."""
    killed = Injected("worker killed", 10.0, 5, frozenset({1}))
    calls = [
        call(9, 10.1, Verdict.LOST),
        call(9, 10.1, Verdict.LOST, port=2),
        call(9, 13, Verdict.LOST),
        call(8, 9.9, Verdict.LOST),
        call(9, 10.1, Verdict.WRONG),
    ]

    assert [one.verdict for one in set_apart(calls, [killed])] == [
        Verdict.CUT, Verdict.LOST, Verdict.LOST, Verdict.LOST, Verdict.WRONG,
    ]  # fmt: skip


def test_recovery_ends_with_a_right_answer_to_a_later_request() -> None:
    """Answers that were on their way do not count, nor do refusals."""
    calls = [call(9.9, 10.1), call(10.2, 10.3, Verdict.REFUSED), call(11, 14), call(12, 13)]

    assert recovery_s(calls, 10.0) == pytest.approx(3)
    assert recovery_s(calls, 12.5) is None


# --- the table -----------------------------------------------------------------------------------


def test_bad_calls_count_for_the_fault_before_them() -> None:
    """Each fault has its injections, its calls and its recoveries."""
    faults = [Injected("stop", 10, 4), Injected("kill", 20, 6), Injected("stop", 30, 2)]
    calls = [
        call(1, 2, Verdict.LOST),
        call(11, 12, Verdict.WRONG),
        call(11, 14),
        call(21, 21.5),
        call(31, 33, Verdict.LOST),
    ]

    found = report(calls, faults, [], lag_p99_s=0.001, others_cores=0.1)
    stop, kill = found.rows["stop"], found.rows["kill"]

    assert (stop.times, stop.in_flight, stop.lost, stop.wrong, stop.late) == (2, 6, 1, 1, 1)
    assert (stop.recovery_s, stop.unrecovered) == ([4], 1)
    assert (kill.times, kill.lost, kill.recovery_s) == (1, 0, [1.5])
    assert found.total("lost") == 2
    assert found.rows["none yet"].lost == 1
    assert "| stop | 2 | 6 | 1 | 1 | 1 | 0 | 4.00 s, 4.00 s, 1 never |" in found.table()


def test_what_is_left_behind_is_named() -> None:
    """Less than before is nothing left behind."""
    before = Census(processes=2, files=40, threads=20, shared=4)

    assert before.left_behind(Census(2, 41, 19, 4)) == {"files": "40 -> 41"}
    assert before.left_behind(before) == {}


def test_what_a_process_holds_is_counted() -> None:
    """A descriptor, a block of shared memory however often it is open, a thread, a child."""
    before = census(os.getpid())
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    block = os.memfd_create("block")
    again = os.dup(block)
    with subprocess.Popen(["sleep", "60"]) as child:
        held = census(os.getpid())
        child.kill()
    over.set()
    thread.join()
    os.close(block)
    os.close(again)

    assert held.processes - before.processes == 1
    assert held.shared - before.shared == 1
    assert held.files - before.files >= 2
    assert held.threads - before.threads == 2
    assert before.left_behind(census(os.getpid())) == {}


# --- the bars ------------------------------------------------------------------------------------


def outcome(*calls: Call, n_planned: int = 1, n_skipped: int = 0) -> Outcome:
    """Return what came of a run with one fault, at 10 s, of a server that is fine otherwise."""
    found = report(calls, [Injected("kill", 10, 1)], [], lag_p99_s=0.001, others_cores=0.1)
    return Outcome(found, {}, {}, Verdict.RIGHT, n_planned, n_skipped)


def missed(run: Outcome, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what the bars say that a run missed, where 80 % must be right."""
    with pytest.raises(SystemExit) as ended:
        judge_run(run, 0.8)
    lines = capsys.readouterr().out.splitlines()
    found = [line[5:].split(":")[0] for line in lines if line.startswith("MISS")]
    assert ended.value.code == bool(found)
    return found


GOOD, DOWN = call(11, 11.5), call(11, 11.5, Verdict.UNAVAILABLE)


def test_a_server_that_answers_again_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls without an answer are not held against it where they could get none."""
    left = [call(11, 11.1, Verdict.LEFT)] * 9
    poisoned = [call(11, 11.1, Verdict.GUILTY)._replace(poisoned=True)] * 9

    assert missed(outcome(*[GOOD] * 8, *[DOWN] * 2, *left, *poisoned), capsys) == []


def test_most_calls_must_be_answered_right(capsys: pytest.CaptureFixture[str]) -> None:
    """Refusing nearly everyone is no way to pass."""
    assert missed(outcome(*[GOOD] * 7, *[DOWN] * 2), capsys) == ["answered right"]
    assert missed(outcome(GOOD, *[DOWN] * 99), capsys) == ["answered right"]


def test_every_fault_must_be_recovered_from(capsys: pytest.CaptureFixture[str]) -> None:
    """Right answers before it say nothing about it."""
    assert missed(outcome(*[call(1, 2)] * 9, DOWN), capsys) == ["faults never recovered from"]


def test_most_faults_must_happen(capsys: pytest.CaptureFixture[str]) -> None:
    """A run in which nothing broke shows nothing."""
    assert missed(outcome(GOOD, n_planned=10, n_skipped=2), capsys) == []
    assert missed(outcome(GOOD, n_planned=10, n_skipped=3), capsys) == [
        "faults without anything to break, share"
    ]


# --- the plan ------------------------------------------------------------------------------------


def test_a_seed_decides_what_happens() -> None:
    """The same visits and faults for the same seed, others for another, and for another user."""

    def first(seed: int, user: int) -> list[Visit]:
        return list(itertools.islice(visits(seed, user, Habits(50)), 20))

    def faults(seed: int) -> object:
        return schedule(seed, ["a", "b", "c"], end=60, mean_gap_s=3)

    assert first(1, 1) == first(1, 1)
    assert first(1, 1) != first(2, 1)
    assert first(1, 1) != first(1, 2)
    assert faults(1) == faults(1) != faults(2)


def test_visits_are_of_every_kind() -> None:
    """Within the limits: one text and thousands, all deadlines, every way to be a bad client."""
    seen = list(itertools.islice(visits(0, 0, Habits(50)), 3000))
    sizes = [len(visit.picks) for visit in seen]

    assert {1, 2} < set(sizes)
    assert 1024 < max(sizes) <= 2048
    assert all(0 <= pick < 50 for visit in seen for pick in visit.picks)
    assert {kind for visit in seen for kind in visit.poison.values()} == {"raise", "nan"}
    for trait in ("timeout_s", "floats", "fresh", "slow_reader", "leave_after_s"):
        assert len({getattr(visit, trait) for visit in seen}) > 1
    assert any(visit.upload_pauses_s for visit in seen)
    assert all(len(v.picks) == 1 for v in itertools.islice(visits(0, 0, Habits(9, 1)), 50))


@given(st.integers(0, 99), st.integers(0, 4), st.floats(0.5, 9))
def test_faults_are_equally_frequent(seed: int, n_faults: int, mean_gap_s: float) -> None:
    """Any schedule is within its time, in order, and prefers no fault."""
    names = [f"fault {k}" for k in range(n_faults)]
    planned = schedule(seed, names, end=60, mean_gap_s=mean_gap_s)
    counts = Counter(one.fault for one in planned)
    times = [one.at for one in planned]

    assert times == sorted(times)
    assert all(0 <= at <= 60 for at in times)
    assert {counts[name] for name in names} <= {min(counts.values(), default=0) + k for k in (0, 1)}
    assert bool(planned) == bool(names)


# --- users ---------------------------------------------------------------------------------------


async def seen_by_a_user(server: Answering, *planned: Visit) -> list[Call]:
    """Return what one user notes of its visits to a server."""
    async with listening(server) as address:
        run = Run(address, "m", POOL, default_deadline_s=5.0, hang_up_s=0.2)
        await User(run, "user1").live(planned)
        assert run.in_flight == 0
        return run.calls


def sent_back(body: bytes, request_id: str, status: str = "200 OK") -> bytes:
    """Return a whole reply to a request."""
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
    return f"{head}\r\n".encode() + body


async def test_users_read_answers_however_slowly_they_come_and_go() -> None:
    """One connection for all but those who want a new one; pieces up and down."""
    numbers = itertools.count(1)

    async def server(_: bytes) -> bytes:
        return sent_back(vectors(0, 1, 2), f"user1-{next(numbers)}")

    calls = await seen_by_a_user(
        server,
        ABC,
        Visit(picks=[0, 1, 2], slow_reader=True, upload_pauses_s=[0.001] * 3),
        Visit(picks=[0, 1, 2], fresh=True),
    )

    assert [one.verdict for one in calls] == [Verdict.RIGHT] * 3
    assert calls[0].port == calls[1].port != calls[2].port
    assert all(one.sent <= one.answered for one in calls)


async def test_a_user_comes_back_when_told_unless_the_run_is_over() -> None:
    """A server that cannot answer yet says when."""
    asked = asyncio.Event()

    async def server(_: bytes) -> bytes:
        asked.set()
        return sent_back(error(), "user1-1\r\nretry-after: 60", "503 Service Unavailable")

    async with listening(server) as address:
        run = Run(address, "m", POOL, default_deadline_s=5.0, hang_up_s=0.2)
        living = asyncio.create_task(User(run, "user1").live([ABC, ABC]))
        await asked.wait()
        run.over.set()
        await living

    assert [(one.verdict, one.retry_after_s) for one in run.calls] == [(Verdict.UNAVAILABLE, 60.0)]


async def test_a_fault_needs_something_to_break() -> None:
    """This process has no others that serve, or run a model."""
    run = Run(("127.0.0.1", 0), "m", POOL, default_deadline_s=1.0)
    target = Target(os.getpid(), Path(), "", run, Random(0))
    for fault in (kill_workers, kill_worker, kill_model, stop_model):
        with pytest.raises(IndexError):
            await fault(target)

    assert target.journal == []


async def test_a_server_that_gives_up_early_is_noticed() -> None:
    """A 504 is right only once the time that a request was given is nearly over."""
    numbers = itertools.count(1)

    async def server(_: bytes) -> bytes:
        return sent_back(error(), f"user1-{next(numbers)}", "504 Gateway Timeout")

    early, unstated, hopeless = await seen_by_a_user(
        server,
        Visit(picks=[0], timeout_s=30.0),
        Visit(picks=[0]),
        Visit(picks=[0], timeout_s=0.02),
    )

    assert [early.verdict, unstated.verdict, hopeless.verdict] == [
        Verdict.WRONG, Verdict.WRONG, Verdict.EXPIRED,
    ]  # fmt: skip
    assert "gave up early" in early.why


async def test_whose_text_breaks_the_model_is_noted() -> None:
    """Since no vectors are due to it."""

    async def server(_: bytes) -> bytes:
        return b""

    calls = await seen_by_a_user(server, ABC, BAD_B)

    assert [one.poisoned for one in calls] == [False, True]


async def test_a_second_answer_is_noticed() -> None:
    """By the next request, or at the end, when the connection is closed."""

    async def server(_: bytes) -> bytes:
        return 2 * sent_back(vectors(0, 1, 2), "user1-1")

    calls = await seen_by_a_user(server, ABC, ABC)

    assert [one.verdict for one in calls] == [Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG]
    assert "the answer of b'user1-1'" in calls[1].why
    assert "bytes after the last answer" in calls[2].why


async def test_a_connection_that_ends_loses_its_request() -> None:
    """And the next one comes on another."""
    replies = iter([b"", sent_back(vectors(0, 1, 2), "user1-2")])

    async def server(_: bytes) -> bytes:
        return next(replies)

    lost, right = await seen_by_a_user(server, ABC, ABC)

    assert (lost.verdict, right.verdict) == (Verdict.LOST, Verdict.RIGHT)
    assert lost.port != right.port != 0


def test_a_connection_that_ends_in_an_upload_loses_its_request() -> None:
    """A transport of uvloop, on which runs are made, takes no more bytes once it is closed."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        # Without a wait for what is unsent: the other end gets a reset.
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def upload() -> list[Call]:
        async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
            run = Run(server.sockets[0].getsockname(), "m", POOL, default_deadline_s=5.0)
            await User(run, "user1").live([Visit(picks=[0], upload_pauses_s=[0.05] * 3)] * 2)
            return run.calls

    assert [one.verdict for one in uvloop.run(upload())] == [Verdict.LOST] * 2


async def test_users_leave_in_three_ways() -> None:
    """Whoever does not wait is not judged, and the next visit is none the worse."""
    numbers = itertools.count(1)
    left = asyncio.Event()

    async def server(_: bytes) -> bytes:
        number = next(numbers)
        if number < 4:
            await left.wait()
        else:
            left.set()
        return sent_back(vectors(0, 1, 2), f"user1-{number}")

    ways: tuple[Leave, ...] = ("close", "reset", "half-close")
    leaving = [Visit(picks=[0, 1, 2], leave_after_s=0.05, leave=how) for how in ways]
    calls = await seen_by_a_user(server, *leaving, ABC)

    assert [one.verdict for one in calls] == [Verdict.LEFT] * 3 + [Verdict.RIGHT]


# --- a real server -------------------------------------------------------------------------------


def test_the_words_that_break_the_model_are_known() -> None:
    """Each is one token of the served vocabulary, the first of its text."""
    folder = resolve(DEFAULT_SOURCE)
    tokenizer = Tokenizer(folder, folder.max_length)
    for word, number in WORDS.values():
        assert tokenizer.encode([f"{word} and more"], truncate="END")[0].ids[1] == number


@pytest.mark.timeout(150)
def test_chaos_for_a_few_seconds(tmp_path: Path) -> None:
    """The model is poisoned and killed, the configuration broken and mended: nothing is lost or
    wrong. How late answers are depends on the machine, so nobody asks.
    """
    path = tmp_path / "chaos.json"
    options = "--workers 1 --users 8 --most-texts 64 --seconds 3 --calm-s 1 --gap-s 0.6 --seed 106"
    command = [sys.executable, "-m", "loadtest.chaos", *options.split(), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert path.exists(), done.stderr
    outcome = json.loads(path.read_text())
    rows = outcome["report"]["rows"].values()
    assert outcome["report"]["endings"]["right"] > 0
    assert sum(row["times"] for row in rows) >= 4 - outcome["n_skipped"]
    assert sum(row["lost"] + row["wrong"] for row in rows) == 0, outcome
    assert (outcome["left_behind"], outcome["busy"], outcome["last"]) == ({}, {}, "right"), outcome
