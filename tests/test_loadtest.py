"""The load tools: schedules, how calls end, figures and bars; loops against a server of our own."""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import numpy as np
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from embedsvc.bench.connection import Answer, Connection
from embedsvc.bench.open_loop import Offsets, OpenLoop, calls_for
from embedsvc.bench.outcome import OK, Outcome, Result, ending_of, percentiles_ms
from embedsvc.bench.scrape import Samples
from embedsvc.bench.serving import served
from loadtest import bookings, restart, workload
from loadtest.arrivals import arrivals, scaled, trace_times
from loadtest.closed import ClosedLoop
from loadtest.cost import between, quantile
from loadtest.ghosts import ghost
from loadtest.overload import judge
from loadtest.shapes import SHAPES, users_at
from loadtest.target import Bars
from tests.wire import DIM, Answering, http, listening, reply

ROOT = Path(__file__).resolve().parents[1]
WHOLE_VECTOR = base64.b64encode(bytes(4 * 384)).decode()


# --- schedules -----------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_no_memory() -> None:
    """The gaps average to the rate and vary as an exponential does; the seed decides them."""
    offsets = arrivals("poisson", rate=200, seconds=100, seed=1)
    gaps = np.diff(offsets)

    assert len(offsets) == pytest.approx(20_000, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    assert np.array_equal(offsets, arrivals("poisson", rate=200, seconds=100, seed=1))
    assert not np.array_equal(offsets, arrivals("poisson", rate=200, seconds=100, seed=2))


@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=50),
    st.floats(0.5, 50),
    st.floats(1, 20),
    st.integers(0, 9),
)
def test_a_recording_fills_the_run(
    gaps: list[float], rate: float, seconds: float, seed: int
) -> None:
    """Any recording gives the wanted number of calls, in order, within the run."""
    offsets = scaled(np.array(gaps), rate, seconds, np.random.default_rng(seed))

    assert len(offsets) == max(1, round(rate * seconds))
    assert offsets[0] == 0
    assert (np.diff(offsets) > 0).all()
    assert offsets[-1] < seconds


def test_a_recording_keeps_its_rhythm() -> None:
    """Scaling stretches all gaps alike."""
    gaps = np.array([1.0, 3.0, 1.0, 3.0])
    offsets = scaled(gaps, rate=2, seconds=4, rng=np.random.default_rng(0))

    assert sorted(set(np.diff(offsets).round(9))) == [0.25, 0.75]


def test_a_trace_is_read_in_seconds(tmp_path: Path) -> None:
    """Time stamps with seven decimals become seconds since the first."""
    path = tmp_path / "trace.csv"
    stamps = ["2023-11-16 23:59:59.5000000", "2023-11-17 00:00:01.2500001"]
    rows = [f"{stamp},374,44\n" for stamp in reversed(stamps)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))

    assert trace_times(path).tolist() == [0, 1.7500001]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_stay_within_the_users(shape: str) -> None:
    """At every moment there is at least one user and never more than there may be."""
    counts = [users_at(shape, at / 100, 7) for at in range(100)]  # type: ignore[arg-type]  # listed

    assert min(counts) >= 1
    assert max(counts) == 7
    assert (len(set(counts)) == 1) == (shape == "steady")


# --- how calls end -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "head", "body", "ending"),
    [
        (200, b"", reply(2), "ok"),
        (200, b"", reply(1), "malformed"),
        (200, b"", b"", "malformed"),
        (429, b"\r\nRetry-After: 7\r\n", b"{}", "rejected"),
        (429, b"\r\nretry-after: 60\r\n", b"{}", "rejected"),
        (429, b"\r\nretry-after: 61\r\n", b"{}", "rejected_without_retry_after"),
        (429, b"\r\nretry-after-ms: 7\r\n", b"{}", "rejected_without_retry_after"),
        (503, b"", b"{}", "unavailable"),
        (504, b"", b"{}", "timed_out"),
        (500, b"", b"{}", "status_500"),
    ],
)
def test_answers_are_told_apart(status: int, head: bytes, body: bytes, ending: str) -> None:
    """Vectors, refusals with and without a time to come back, and failures have their names."""
    tokens = 7 if ending == OK else 0

    assert ending_of(Answer(status, head, body), 2, DIM) == (ending, tokens)


def result(ending: str = OK, latency: float = 0.1, tokens: int = 10, due: float = 0.0) -> Result:
    """Return a call of one text that left on time."""
    return Result(ending, due, due, due + latency, 1, tokens if ending == OK else 0)


MIXED = Outcome(
    seconds=2.0,
    results=[
        result(latency=0.1, tokens=32),
        result(latency=0.3, tokens=33),
        result(latency=1.5, tokens=300),
        result("timed_out", latency=0.95),
        result("rejected", latency=0.01),
        result("rejected_without_retry_after", latency=0.03),
        result("lost", latency=0.2),
    ],
)


def test_figures_count_what_they_say() -> None:
    """Rates are of answers, goodput of timely ones among all calls, refusals are apart."""
    summary = MIXED.summary(slo_ms=300)

    assert summary["calls"] == 7
    assert summary["answered_per_s"] == 1.5
    assert summary["tokens_per_s"] == round(365 / 2)
    assert summary["goodput"] == {"slo_ms": 300, "per_s": 1.0, "share": round(2 / 7, 4)}
    assert summary["errors"] == {
        "timed_out": 1, "rejected": 1, "rejected_without_retry_after": 1, "lost": 1,
    }  # fmt: skip
    assert summary["refusal_ms"] == percentiles_ms([0.01, 0.03])
    assert "goodput" not in MIXED.summary()


def test_latencies_are_by_length() -> None:
    """Each answer counts in the class of its tokens, shortest class first."""
    assert list(MIXED.latencies) == ["le_32", "le_128", "le_512"]
    assert MIXED.latencies["le_128"] == [0.3]


def test_deadlines_are_missed_by_the_admitted_only() -> None:
    """Late answers, 504 and calls given up count; refusals and lost connections do not."""
    assert MIXED.missed(1.0) == pytest.approx(2 / 4)
    assert Outcome(1.0, [result("rejected")]).missed(1.0) == 0
    assert Outcome(1.0, [result(), result("gone", 9.0)]).missed(1.0) == 0.5


def test_latency_counts_from_when_a_call_was_due() -> None:
    """A client that sends late shows it twice: in the latency and as its lag."""
    late = Outcome(1.0, [Result(OK, due=1.0, sent=1.5, finished=1.6, n_texts=1, tokens=9)])

    assert late.latencies == {"le_32": [pytest.approx(0.6)]}
    assert late.lags == [0.5]


def test_percentiles_are_in_milliseconds() -> None:
    """Known values give known percentiles; nothing gives a count of nothing."""
    assert percentiles_ms([i / 100 for i in range(101)]) == {
        "n": 101, "p50": 500, "p90": 900, "p99": 990, "max": 1000,
    }  # fmt: skip
    assert percentiles_ms([]) == {"n": 0}


def test_the_table_shows_endings_and_classes() -> None:
    """The text form has a row for every class, the refused, and the lag."""
    table = MIXED.table(slo_ms=300)

    for words in ("7 calls", "rejected 1", "goodput 1.0/s", "le_512", "refused", "left late by"):
        assert words in table
    assert "goodput" not in MIXED.table()


# --- loops ---------------------------------------------------------------------------------------


def test_a_closed_loop_counts_the_window_once() -> None:
    """After warm-up exactly the measured calls count: texts, tokens, errors by kind."""
    outcome = uvloop.run(six_calls())

    assert outcome.endings == {OK: 4, "rejected_without_retry_after": 2}
    assert outcome.texts_per_s * outcome.seconds == pytest.approx(4)
    assert outcome.tokens_per_s * outcome.seconds == pytest.approx(28)
    assert outcome.seconds > 0


async def six_calls() -> Outcome:
    """Measure six calls after three, against a server that refuses every third."""
    answers = itertools.cycle([http(reply(1)), http(reply(1)), http(b"{}", "429 Busy")])

    async def answer(_: bytes) -> bytes:
        return next(answers)

    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a", "b"])
        return await ClosedLoop(calls, DIM, n_warmup=3, n_measured=6).run(*address, n_clients=1)


async def open_run(
    answer: Answering, offsets: list[float], *, n_connections: int = 100, give_up_s: float = 15.0
) -> Outcome:
    """Run an open loop of one-text calls against a server."""
    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a", "b"])
        loop = OpenLoop(address, calls, dim=DIM, n_connections=n_connections, give_up_s=give_up_s)
        schedule: Offsets = np.array(offsets)
        return await loop.run(schedule)


async def test_an_open_loop_waits_for_nobody() -> None:
    """All calls leave although none is answered before the last has arrived."""
    all_there = asyncio.Barrier(5)

    async def answer(_: bytes) -> bytes:
        await all_there.wait()
        return http(reply(1))

    outcome = await open_run(answer, [0.0, 0.001, 0.001, 0.002, 0.004])

    assert outcome.endings == {OK: 5}
    assert outcome.n_connections == 5
    assert outcome.seconds >= 0.004


async def test_an_open_loop_keeps_its_schedule() -> None:
    """Calls are due when the schedule says, and never leave earlier."""
    offsets = [0.0, 0.003, 0.0035, 0.01]

    async def answer(_: bytes) -> bytes:
        return http(reply(1))

    outcome = await open_run(answer, offsets)
    due = sorted(result.due for result in outcome.results)

    assert np.diff(due) == pytest.approx(np.diff(offsets))
    assert min(outcome.lags) >= 0


async def test_calls_wait_for_a_connection() -> None:
    """With one connection calls go one after the other, and their waiting counts as latency."""

    async def answer(_: bytes) -> bytes:
        return http(reply(1))

    outcome = await open_run(answer, [0.0] * 4, n_connections=1)
    results = outcome.results

    assert outcome.n_connections == 1
    assert all(b.sent >= a.finished for a, b in itertools.pairwise(results))
    assert [result.latency for result in results] == sorted(result.latency for result in results)
    assert results[-1].latency > results[-1].finished - results[-1].sent


async def test_a_client_gives_up() -> None:
    """A call without an answer ends when the client hangs up; the next has a new connection."""
    hung_up = asyncio.Event()
    silent = iter([True, False])

    async def answer(_: bytes) -> bytes:
        if next(silent):
            await hung_up.wait()
        return http(reply(1))

    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a"])
        loop = OpenLoop(address, calls, dim=DIM, n_connections=1, give_up_s=0.3)
        outcome = await loop.run(np.array([0.0, 0.25]))
        hung_up.set()

    assert [result.ending for result in outcome.results] == ["gone", OK]


async def test_calls_that_wait_too_long_for_a_connection_are_not_sent() -> None:
    """A client that is far behind its schedule ends all the same."""
    gate = asyncio.Event()

    async def answer(_: bytes) -> bytes:
        await gate.wait()
        return http(reply(1))

    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a"])
        loop = OpenLoop(address, calls, dim=DIM, n_connections=1, give_up_s=0.02)
        outcome = await loop.run(np.zeros(5))
        gate.set()

    assert outcome.endings == {"gone": 5}


async def test_lost_connections_are_counted() -> None:
    """A server that hangs up loses a call; one that is not there loses all."""
    answers = iter([b"", http(reply(1))])

    async def answer(_: bytes) -> bytes:
        return next(answers)

    outcome = await open_run(answer, [0.0, 0.0], n_connections=1)
    assert outcome.endings == {"lost": 1, OK: 1}

    async with listening(answer) as address:
        calls = calls_for(*address, "m", ["a"])
    loop = OpenLoop(address, calls, dim=DIM, n_connections=9, give_up_s=9)
    assert (await loop.run(np.zeros(3))).endings == {"lost": 3}


async def test_an_empty_schedule_ends_at_once() -> None:
    """A run without arrivals has an outcome without calls."""
    loop = OpenLoop(("127.0.0.1", 9), [], dim=DIM, n_connections=1, give_up_s=1)

    assert (await loop.run(np.array([]))).results == []


def test_calls_carry_headers_and_texts() -> None:
    """Every request states the headers given; the last one has the texts that are left."""
    calls = calls_for("h", 1, "m", ["a", "b", "c"], 2, {"x-request-timeout": "1"})

    assert [call.n_texts for call in calls] == [2, 1]
    assert all(b"\r\nx-request-timeout: 1\r\n" in call.request for call in calls)


# --- clients that retry or vanish ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "attempt"),
    [
        (http(reply(1, vector=WHOLE_VECTOR)), (False, "ok")),
        (http(b"{}", "503 Busy", "retry-after: 3\r\n"), (True, "unavailable")),
        (http(b"{}", "500 Bug"), (False, "status_500")),
        (b"", (True, "crossed")),
    ],
)
async def test_what_may_be_tried_again(written: bytes, attempt: tuple[bool, str]) -> None:
    """Only what the server cannot have accepted is tried again."""

    async def answer(_: bytes) -> bytes:
        return written

    async with listening(answer) as address:
        connection = Connection(*address)
        (call,) = calls_for(*address, "m", ["a"])
        *ended, pause_s = await restart.attempt(connection, call)
        connection.close()

    assert tuple(ended) == attempt
    assert pause_s == (3 if b"retry-after" in written else restart.RETRY_S)


async def test_where_nobody_listens_is_tried_again() -> None:
    """A server that is being started refuses connections for a while."""

    async def answer(_: bytes) -> bytes:
        return b""

    async with listening(answer) as address:
        (call,) = calls_for(*address, "m", ["a"])

    assert await restart.attempt(Connection(*address), call) == (
        True, "no connection", restart.RETRY_S,
    )  # fmt: skip


def test_a_request_that_was_accepted_and_lost_has_failed() -> None:
    """A connection that ends later than two messages could cross is no reason to try again."""
    error = ConnectionResetError()

    assert restart.after_loss(error, restart.CROSSED_S / 2) == (True, "crossed")
    assert restart.after_loss(error, restart.CROSSED_S) == (False, f"lost: {error!r}")


async def test_a_client_retries_until_it_is_answered() -> None:
    """One call is counted once, its retries by reason."""
    answers = iter(
        [
            http(b"{}", "429 Busy", "retry-after: 0\r\n"),
            http(b"{}", "503 Busy", "retry-after: 0\r\n"),
            http(reply(1, vector=WHOLE_VECTOR)),
        ]
    )

    async def answer(_: bytes) -> bytes:
        return next(answers)

    tally = restart.Tally()
    async with listening(answer) as address:
        connection = Connection(*address)
        (call,) = calls_for(*address, "m", ["a"])
        await restart.call_until_answered(connection, call, tally)
        connection.close()

    assert tally.retries == {"rejected_without_retry_after": 1, "unavailable": 1}
    assert (len(tally.seconds), tally.failures) == (1, {})


async def test_the_refused_come_back_once_as_told() -> None:
    """A second refusal is counted and not tried again."""
    refusal = http(b"{}", "429 Busy", "retry-after: 1\r\nretry-after-ms: 7\r\n")
    answers = iter([refusal, refusal, http(reply(1, vector=WHOLE_VECTOR)), refusal])

    async def answer(_: bytes) -> bytes:
        return next(answers)

    async with listening(answer) as address:
        (call,) = calls_for(*address, "m", ["a"])
        twice, once = [await bookings.burst(address, [call]) for _ in range(2)]

    assert (twice.first, twice.second, twice.told_s) == ({"rejected": 1}, {"rejected": 1}, [0.007])
    assert (once.first, once.second) == ({"ok": 1}, {})


async def test_ghosts_leave_at_every_stage() -> None:
    """Some are answered first, some leave during the upload, whatever way they leave."""

    async def answer(_: bytes) -> bytes:
        return http(reply(1))

    rng = random.Random(0)
    async with listening(answer) as address:
        (call,) = calls_for(*address, "m", ["a"])
        endings = {await ghost(address, call.request, rng, 0.01) for _ in range(30)}

    assert {"answered", "left uploading"} <= endings


# --- the server under test -----------------------------------------------------------------------


def test_metrics_are_summed_over_labels() -> None:
    """A total adds the samples that have the labels asked for; gauges at zero are idle."""
    samples = Samples(
        "# TYPE embedsvc_tokens counter\n"
        'embedsvc_tokens_total{model="a",kind="real"} 3\n'
        'embedsvc_tokens_total{model="b",kind="real"} 4\n'
        'embedsvc_tokens_total{model="b",kind="computed"} 8\n'
        'embedsvc_queue_tokens{model="a"} 5\n'
        'embedsvc_queue_sequences{model="a"} 0\n'
    )

    assert samples.total("embedsvc_tokens_total", kind="real") == 7
    assert samples.busy == {"embedsvc_queue_tokens": 5}


@pytest.mark.parametrize(("value", "status"), [(2.0, 0), (2.1, 1)])
def test_bars_decide_the_exit_status(
    value: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar that is missed once is missed for good, and said."""
    bars = Bars()
    bars.at_most("factor", value, 2.0)
    bars.at_least("answers", 3, 3)
    bars.empty("errors", {})
    with pytest.raises(SystemExit) as ended:
        bars.exit()

    assert bool(ended.value.code) == status
    assert capsys.readouterr().out.count("MISS") == status


PEAK = Outcome(1.0, [result(due=i / 100) for i in range(100)])
REFUSED = [result("rejected", latency=0.002) for _ in range(300)]


@pytest.mark.parametrize(
    ("outcome", "busy", "lines", "met"),
    [
        (Outcome(1.0, PEAK.results + REFUSED), {}, ["x WARNING requests refused n=300"], True),
        (Outcome(1.0, PEAK.results + REFUSED), {"queue": 1.0}, [], False),
        (Outcome(1.0, PEAK.results + REFUSED), {}, ["refused"] * 3, False),
        (Outcome(1.0, PEAK.results[:80] + REFUSED), {}, [], False),
        (Outcome(1.0, PEAK.results + REFUSED + [result("lost")]), {}, [], False),
        (Outcome(1.0, PEAK.results + REFUSED + [result("timed_out")] * 2), {}, [], False),
        (Outcome(1.0, PEAK.results + [result("rejected", 0.06)] * 300), {}, [], False),
        (PEAK, {}, [], False),
    ],
)
def test_overload_is_judged(
    outcome: Outcome, busy: dict[str, float], lines: list[str], met: bool
) -> None:
    """Every bar of the overload can fail the run, and all met pass it."""
    with pytest.raises(SystemExit) as ended:
        judge(PEAK, outcome, busy, lines, seconds=1.0)

    assert ended.value.code == (not met)


def test_quantiles_of_a_histogram_lie_inside_their_bucket() -> None:
    """Errors are spread evenly over a bucket; beyond the last bound it is that bound."""
    counts = {0.02: 10.0, 0.08: 50.0, 0.25: 90.0, inf: 100.0}

    assert quantile(counts, 0.05) == pytest.approx(0.01)
    assert quantile(counts, 0.5) == pytest.approx(0.08)
    assert quantile(counts, 0.7) == pytest.approx(0.165)
    assert quantile(counts, 0.99) == 0.25


def test_errors_are_counted_between_two_scrapes() -> None:
    """What a server had judged before does not count, nor what another width had."""
    family = "# TYPE embedsvc_cost_error_ratio histogram\n"

    def scraped(n_short: int, n_long: int) -> Samples:
        lines = [
            f'embedsvc_cost_error_ratio_bucket{{width="{width}",le="{le}"}} {n}'
            for width, n in (("le_16", n_short), ("le_256", n_long))
            for le in ("0.08", "+Inf")
        ]
        return Samples(family + "\n".join(lines) + "\n")

    before, after = scraped(5, 0), scraped(5, 3)

    assert between(before, after) == {0.08: 3, inf: 3}
    assert between(before, after, width="le_256") == {0.08: 3, inf: 3}
    assert between(before, after, width="le_16") == {}


def test_questions_are_shorter_than_passages() -> None:
    """The two pools of the mixed workload hold what their names say."""
    short, long = workload.questions_and_passages()

    assert np.median([len(text) for text in short]) * 3 < np.median([len(text) for text in long])
    assert set(workload.mixed(50)) <= {*short, *long}


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "line",
    [
        "burst --calls 50",
        "cost --clients 4 --calls 100 --seconds 1",
        "fairness --queries 40 --texts 64",
        "ghosts --ghosts 40",
        "idle --connections 60 --seconds 1",
        "overload --seconds 1 --peak-calls 50 --max-rate 200",
        "restart --restarts 1 --clients 4",
        "shares --seconds 1",
    ],
)
def test_measurements_run_to_their_bars(line: str) -> None:
    """Every script starts its own server, measures and judges; its status says what it printed."""
    name, *arguments = line.split()
    command = [sys.executable, "-m", f"loadtest.{name}", *arguments, "--backend", "hash"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "(bar: " in done.stdout, done.stderr
    assert done.returncode == ("MISS" in done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_locust_runs_without_failures() -> None:
    """README's locust command ends with status 0, with all kinds of users answered."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^locust .*", readme, re.MULTILINE)
    with served("--backend", "hash") as server:
        line = line.replace("http://127.0.0.1:8000", f"http://{server.host}:{server.port}")
        command = [sys.executable, "-m", *line.replace("-t 2m", "-t 6s").split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    for name in ("Queries", "Documents", "Bulk"):
        assert re.search(rf"POST +{name} +\d+ +0\(0.00%\)", done.stderr), done.stderr
