"""The classic comparison, served: batching settings under the same rates, beside what is predicted.

Every setting is a server of its own behind HTTP, under an open loop. It is predicted what becomes
of the same texts at the same times.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
import uvloop
from msgspec.structs import replace

from embedsvc.bench.comparison import HEADER, Row, Saturation, summary
from embedsvc.bench.open_loop import Offsets, calls_for, poisson, run_open
from embedsvc.bench.outcome import GONE, OK, REFUSED, TIMED_OUT, Outcome
from embedsvc.bench.scrape import Samples, info, scrape, seconds_to_idle
from embedsvc.bench.serving import Server, served
from embedsvc.bench.study import Study, plan_of, study
from embedsvc.config import BatchingConfig, Config
from embedsvc.errors import ConfigError, EmbedsvcError
from embedsvc.intake import DEADLINE_RESERVE_S, DEADLINE_SHARE
from embedsvc.tuning.predict import SHORT_TOKENS, Plan, Point, Series, predict_arrivals, quantile
from embedsvc.tuning.simulate import Arrival

CONFIGURED = "as configured"
# Shares of the measured saturation of the configuration.
LOADS = (0.4, 0.6, 0.8)
# A slow model gets more time, so that there are figures at all.
MIN_CALLS = 20
N_CONNECTIONS = 512
WARM_UP_S = 1.0
# Beyond its deadline a call is waited for this long, to see how it ends; so is an idle server.
GRACE_S = 10.0


def classic_settings(batching: BatchingConfig, max_length: int) -> dict[str, BatchingConfig]:
    """Return the classic race of size and time-out in some variants.

    One bucket for all lengths, and a batch is full by its rows alone. The order is still that of
    this engine, which serves short texts a little earlier than a queue would.
    """

    def classic(rows: int, delay_ms: float) -> BatchingConfig:
        return replace(
            batching,
            buckets=[max_length],
            max_batch_size=rows,
            max_batch_tokens=rows * max_length,
            max_batch_delay_ms=delay_ms,
        )

    return {
        "no batching": classic(1, 0.0),
        "8 at 2 ms": classic(8, 2.0),
        "32 at 2 ms": classic(32, 2.0),
        "32 at 20 ms": classic(32, 20.0),
    }


@dataclass(slots=True, frozen=True)
class Load:
    """What every server gets.

    Attributes:
        texts: one a call, in turns.
        rates: texts per second; none: shares of the measured saturation.
        seconds: length of one measurement.
        timeout_s: deadline that every call states.
        slo_s: what a good answer takes at most.
    """

    texts: list[str]
    rates: tuple[float, ...]
    seconds: float
    timeout_s: float
    slo_s: float


class Sweep:
    """A comparison of all settings at all rates, one server after the other.

    Args:
        config: its first model is served.
        load: what every server gets.
        points: where what was measured is written, for `tune --points`.
    """

    def __init__(self, config: Config, load: Load, points: Path | None = None) -> None:
        self._config = config
        self._load = load
        self._points = points
        self._rows: list[Row] = []

    def lines(self) -> Iterator[str]:
        """Measure, and yield a table line by line as it comes.

        Raises:
            ConfigError: the points cannot be written.
            EmbedsvcError: a server did not start, or answered with something else than vectors,
                refusals and time-outs.
        """
        self._write()
        for found in sweep(self._config, self._load):
            if isinstance(found, Row):
                self._rows.append(found)
            yield found.line
            if isinstance(found, Saturation):
                yield HEADER
        self._write()
        yield summary(self._rows)

    def _write(self) -> None:
        if self._points is None:
            return
        by_name: dict[str, list[Point]] = defaultdict(list)
        for row in self._rows:
            by_name[row.name].append(row.measured)
        series = [Series(name, points) for name, points in by_name.items()]
        try:
            self._points.write_bytes(msgspec.json.encode(series))
        except OSError as error:
            raise ConfigError(
                f"--points: {self._points} cannot be written: {error.strerror}"
            ) from None


def sweep(config: Config, load: Load) -> Iterator[Saturation | Row]:
    """Measure every setting at every rate; raises as `Sweep.lines`."""
    batching = config.models[0].versions[0].batching
    with _serving(config, batching) as server:
        known = study(server, load.texts, batching, load.seconds)
        yield Saturation(CONFIGURED, known.saturation, known.predicted)
        rates = load.rates or tuple(round(share * known.saturation, 1) for share in LOADS)
        for rate in rates:
            yield measure(server, CONFIGURED, batching, rate, load, known)
    for name, other in classic_settings(batching, known.max_length).items():
        with _serving(config, other) as server:
            warm_up = poisson(rates[0], WARM_UP_S, np.random.default_rng(0))
            _run(server, warm_up, load)
            for rate in rates:
                yield measure(server, name, other, rate, load, known)


@contextmanager
def _serving(config: Config, batching: BatchingConfig) -> Iterator[Server]:
    """Serve the first model of a configuration with other batching, to this process alone."""
    model = config.models[0]
    version = replace(model.versions[0], batching=batching)
    changed = replace(
        config,
        server=replace(config.server, host="127.0.0.1", workers=1, keys_file=""),
        models=[replace(model, versions=[version])],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.toml")
        path.write_bytes(msgspec.toml.encode(changed))
        with served(str(path), "--log-level", "error") as server:
            yield server


def measure(
    server: Server, name: str, batching: BatchingConfig, rate: float, load: Load, known: Study
) -> Row:
    """Predict and measure one rate; the server is idle before and after."""
    seconds = max(load.seconds, MIN_CALLS / rate)
    offsets = poisson(rate, seconds, np.random.default_rng(0))
    plan = plan_of(uvloop.run(info(server.address)), batching)
    predicted = _predict(plan, rate, offsets, load, known)
    before = uvloop.run(scrape(server.address))
    outcome = _run(server, offsets, load)
    after = uvloop.run(scrape(server.address))
    measured = point_of(outcome, rate, load.slo_s, before, after)
    return Row(name, measured, predicted, quantile(np.array(outcome.lags), 0.99) or 0.0)


def _run(server: Server, offsets: Offsets, load: Load) -> Outcome:
    """Send calls; return when all have ended and the server is idle.

    Raises:
        EmbedsvcError: a call ended as none may, or the server does not become idle.
    """
    headers = {"x-request-timeout": f"{load.timeout_s:g}"}
    outcome = run_open(
        server.address,
        calls_for(*server.address, server.model, load.texts, headers=headers),
        offsets,
        dim=uvloop.run(info(server.address))["dim"],
        n_connections=N_CONNECTIONS,
        give_up_s=load.timeout_s + GRACE_S,
    )
    allowed = {OK, TIMED_OUT, GONE, *REFUSED}
    wrong = {name: n for name, n in outcome.endings.items() if name not in allowed}
    _, busy = uvloop.run(seconds_to_idle(server.address, GRACE_S))
    if wrong or busy:
        raise EmbedsvcError(f"calls ended wrong: {wrong}; not idle after {GRACE_S:g} s: {busy}")
    return outcome


def _predict(plan: Plan, rate: float, offsets: Offsets, load: Load, known: Study) -> Point:
    # What the engine makes of a stated deadline.
    timeout_s = DEADLINE_SHARE * load.timeout_s - DEADLINE_RESERVE_S
    coming = zip(offsets.tolist(), cycle(known.lengths), strict=False)
    return predict_arrivals(
        [Arrival(at, (length,), timeout_s) for at, length in coming],
        known.cost,
        plan,
        rate,
        timeout_s,
        slo_s=load.slo_s,
        overhead_s=known.overhead_s,
    )


def point_of(outcome: Outcome, rate: float, slo_s: float, before: Samples, after: Samples) -> Point:
    """Return what was measured: latencies by the client, batches by the server's metrics."""

    def rise(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    endings = outcome.endings
    latencies = np.array([one.latency for one in outcome.answered])
    short = np.array([one.latency for one in outcome.answered if one.tokens <= SHORT_TOKENS])
    batches = rise("embedsvc_batch_rows_count")
    real, computed = (rise("embedsvc_tokens_total", kind=kind) for kind in ("real", "computed"))
    return Point(
        rate=rate,
        texts_per_s=outcome.texts_per_s,
        good_per_s=outcome.within(slo_s) / outcome.seconds,
        mean_rows=rise("embedsvc_batch_rows_sum") / batches if batches else 0.0,
        padding=1 - real / computed if computed else 0.0,
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        short_p99_s=quantile(short, 0.99),
        n_rejected=sum(endings[name] for name in REFUSED),
        n_timed_out=endings[TIMED_OUT] + endings[GONE],
    )
