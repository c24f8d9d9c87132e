"""`bench sweep`: what is compared, how measurements become figures, and whole runs."""

from __future__ import annotations

from math import inf
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from embedsvc.bench.comparison import Row, Saturation, off_by, summary
from embedsvc.bench.outcome import GONE, OK, REJECTED, REJECTED_SILENTLY, TIMED_OUT, Outcome, Result
from embedsvc.bench.scrape import Samples
from embedsvc.bench.serving import served
from embedsvc.bench.study import corrected, study
from embedsvc.bench.sweep import Load, classic_settings, measure, point_of
from embedsvc.bench.texts import builtin_texts
from embedsvc.config import BatchingConfig
from embedsvc.configfile import load
from embedsvc.engine.cost import CostModel
from embedsvc.metrics import WIDTH_CLASS_NAMES
from embedsvc.tuning.predict import Point, Series
from tests.terminal import embedsvc

POINT = Point(
    rate=100.0,
    texts_per_s=99.0,
    good_per_s=90.0,
    mean_rows=2.5,
    padding=0.1,
    p50_s=0.010,
    p99_s=0.200,
    short_p99_s=0.1,
    n_rejected=3,
    n_timed_out=1,
)


def test_classic_settings_are_legal_and_full_by_rows_alone(tmp_path: Path) -> None:
    """A server takes each of them, and no budget cuts a batch of the longest texts."""
    for batching in classic_settings(BatchingConfig(), max_length=256).values():
        path = tmp_path / "config.toml"
        body = {"name": "v1", "source": "m", "batching": msgspec.to_builtins(batching)}
        path.write_bytes(msgspec.toml.encode({"models": [{"name": "m", "versions": [body]}]}))
        read = load(path).models[0].versions[0].batching

        assert read == batching
        assert read.buckets == [256]
        assert read.max_batch_tokens == 256 * read.max_batch_size


@pytest.mark.parametrize(
    ("changes", "misses"),
    [
        ({}, []),
        ({"texts_per_s": 108.0, "p50_s": 0.0119}, []),
        ({"texts_per_s": 110.0}, ["ok/s +11%"]),
        ({"texts_per_s": 88.0, "p50_s": 0.007}, ["ok/s -11%", "p50 -30%"]),
        ({"p50_s": None}, ["p50 -100%"]),
        ({"p99_s": 9.0, "mean_rows": 9.0}, []),
    ],
)
def test_predictions_are_judged(changes: dict[str, float], misses: list[str]) -> None:
    """Texts per second and the median have bars, and a line says which of them is missed."""
    row = Row("8 at 2 ms", POINT, replace(POINT, **changes), lag_s=0.0)

    assert row.misses == misses
    assert row.line.endswith(f"MISS {', '.join(misses)}" if misses else "ok")
    assert "8 at 2 ms" in row.line
    assert summary([row, Row("", POINT, POINT, 0.0)]).startswith(f"{2 - bool(misses)} of 2 ")


def test_a_late_client_is_told() -> None:
    """Latencies include the client's own delay, so a line says where it is large."""
    assert "the client was 80 ms late" in Row("", POINT, POINT, lag_s=0.080).line
    assert "late" not in Row("", POINT, POINT, lag_s=0.020).line


def test_saturation_is_judged() -> None:
    """Ten per cent off is the most."""
    assert Saturation("a", 100.0, 109.0).line.endswith("(+9%) ok")
    assert Saturation("a", 100.0, 89.0).line.endswith("(-11%) MISS")


@pytest.mark.parametrize(
    ("predicted", "measured", "off"),
    [(3.0, 2.0, 0.5), (1.0, 2.0, -0.5), (0.0, 0.0, 0.0), (1.0, 0.0, inf), (0.0, 1.0, -1.0)],
)
def test_errors_are_shares_of_what_was_measured(
    predicted: float, measured: float, off: float
) -> None:
    """Where nothing was measured, any prediction is off beyond measure."""
    assert off_by(predicted, measured) == off


def metrics(batches: int, rows: int, real: int, computed: int) -> Samples:
    return Samples(
        "# TYPE embedsvc_batch_rows histogram\n"
        f"embedsvc_batch_rows_count {batches}\n"
        f"embedsvc_batch_rows_sum {rows}\n"
        "# TYPE embedsvc_tokens counter\n"
        f'embedsvc_tokens_total{{kind="real"}} {real}\n'
        f'embedsvc_tokens_total{{kind="computed"}} {computed}\n'
    )


def test_a_point_counts_what_ended_in_between() -> None:
    """Latencies come from the answers, rows and padding from what the metrics rose by."""
    ended = [
        (OK, 0.01, 8),
        (OK, 0.03, 200),
        (REJECTED, 0.001, 0),
        (REJECTED_SILENTLY, 0.001, 0),
        (TIMED_OUT, 2.0, 0),
        (GONE, 9.0, 0),
    ]
    results = [Result(name, 0.0, 0.0, seconds, 1, tokens) for name, seconds, tokens in ended]

    point = point_of(
        Outcome(2.0, results), 3.0, 0.02, metrics(5, 9, 100, 200), metrics(7, 15, 190, 320)
    )

    assert (point.rate, point.texts_per_s, point.good_per_s) == (3.0, 1.0, 0.5)
    assert (point.mean_rows, point.padding) == (3.0, 0.25)
    assert (point.p50_s, point.short_p99_s) == (0.02, 0.01)
    assert (point.n_rejected, point.n_timed_out) == (2, 2)


@given(st.floats(0.3, 3), st.sampled_from([8, 100, 256, 512]))
def test_corrections_scale_the_cost(factor: float, max_length: int) -> None:
    """Law: where all batches take so many times as long as predicted, so does the corrected cost,
    up to the longest text."""
    cost = CostModel(3e-3, 1e-4, 5e-5, 4e-8)
    lines = [
        f'embedsvc_cost_correction{{width="{name}",quantile="{quantile}"}} {value}'
        for name in WIDTH_CLASS_NAMES
        for quantile, value in (("0.5", factor), ("0.95", 9))
    ]
    samples = Samples("# TYPE embedsvc_cost_correction gauge\n" + "\n".join(lines) + "\n")

    scaled = corrected(cost, samples, max_length)

    for rows in (1, 8, 16):
        assert scaled(rows, max_length) == pytest.approx(factor * cost(rows, max_length), rel=1e-6)


def run(*arguments: str | Path) -> tuple[int, str, str]:
    return embedsvc("bench", "sweep", *arguments)


@pytest.mark.parametrize("rates", ["0", "x", "10,,20", "10,nan", "inf", "-1"])
def test_rates_that_are_none_are_refused(rates: str) -> None:
    """A wrong list is told with the flag before anything starts."""
    status, out, err = run("--rates", rates)

    assert (status, out) == (2, "")
    assert f"'--rates': must be numbers from 1 up, separated by commas, got '{rates}'" in err


def test_points_that_cannot_be_written_are_told_at_once(tmp_path: Path) -> None:
    """Nobody waits for minutes to lose the measurement."""
    path = tmp_path / "absent" / "points.json"

    status, out, err = run("--backend", "hash", "--points", path)

    assert (status, out) == (1, "")
    assert err == f"embedsvc: --points: {path} cannot be written: No such file or directory\n"


@pytest.mark.timeout(60)
def test_a_server_is_studied_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is asked for what predictions need, and answers every call of a light load."""
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = builtin_texts(50)
    batching = BatchingConfig()
    with served("--backend", "hash", "--log-level", "error") as server:
        known = study(server, texts, batching, seconds=0.2)
        row = measure(server, "a", batching, 50.0, Load(texts, (), 1.0, 5.0, 1.0), known)

    assert len(known.lengths) == 50
    assert max(known.lengths) <= known.max_length == 256
    assert known.saturation > 0
    assert row.measured.n_rejected == row.predicted.n_rejected == 0
    assert row.measured.texts_per_s > 0
    assert row.predicted.p50_s is not None
    assert row.predicted.p50_s >= known.overhead_s
    assert row.measured.mean_rows >= 1
    assert row.measured.padding >= 0


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_sweep_measures_every_setting_at_every_rate(tmp_path: Path) -> None:
    """The table has a line for each, and the points are what `tune` reads."""
    path = tmp_path / "points.json"

    flags = ["--backend", "hash", "--rates", "40,20", "--seconds", "1", "--points", str(path)]
    status, out, err = run(*flags)
    series = msgspec.json.decode(path.read_bytes(), type=list[Series])

    assert status == 0, err
    names = ["as configured", *classic_settings(BatchingConfig(), 256)]
    assert [one.name for one in series] == names
    assert all([point.rate for point in one.points] == [20.0, 40.0] for one in series)
    assert [out.count(f"\n{name}") for name in names] == [2] * 5
    assert " of 10 predictions " in out
