"""The commands of `embedsvc bench`. They import what they need when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from embedsvc.terminal import (
    FILE,
    config_argument,
    load_config,
    log_level,
    mistakes_in_one_line,
    model_options,
    option,
    print_result,
    set_up_logging,
)

texts_option = option(
    "--texts",
    type=FILE,
    help='JSONL file of {"text": …} rows; without it, 2,000 built-in texts.',
)


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@config_argument()
@model_options
@texts_option
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@log_level
def offline(
    config: Path | None, texts: Path | None, as_json: bool, log_level: str, **flags: Any
) -> None:
    """Measure the limit: the model on length-sorted batches, without HTTP and queue."""
    set_up_logging(log_level)
    with mistakes_in_one_line():
        effective = load_config(config, flags)
        from embedsvc.bench.offline import run_offline

        print_result(run_offline(effective, texts_of(texts)), as_json)


@bench.command()
@option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="Turns of each.")
@option("--seconds", type=click.FloatRange(1), default=5.0, show_default=True, help="Of one turn.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def pipeline(rounds: int, seconds: float, as_json: bool) -> None:
    """Measure everything but the model: weightless vectors beside a bare Litestar handler.

    Driven by wrk where it is installed, else by a client of our own.
    """
    set_up_logging("warning")
    with mistakes_in_one_line():
        from embedsvc.bench.pipeline import run_pipeline

        result = run_pipeline(rounds, seconds)
        if result.client != "wrk":
            click.echo("wrk is not installed: driven by our own client", err=True)
        print_result(result, as_json)


@bench.command()
@config_argument()
@model_options
@texts_option
@option("--rates", metavar="RATE,...", callback=lambda _, __, given: rates_of(given),
        help="Texts per second; without it 40, 60 and 80 % of measured saturation.")  # fmt: skip
@option("--seconds", type=click.FloatRange(1), default=5.0, show_default=True, help="Of one rate.")
@option("--timeout-s", type=click.FloatRange(0.1), default=2.0, show_default=True,
        help="Deadline that every call states.")  # fmt: skip
@option("--slo-ms", type=click.FloatRange(1), default=250.0, show_default=True,
        help="What a good answer takes at most.")  # fmt: skip
@option("--points", type=FILE,
        help="Write what was measured here, for `tune --points`.")  # fmt: skip
def sweep(
    config: Path | None,
    texts: Path | None,
    rates: tuple[float, ...],
    seconds: float,
    timeout_s: float,
    slo_ms: float,
    points: Path | None,
    **flags: Any,
) -> None:
    """Serve the configuration and the classic settings in turn; compare them, and predictions.

    The classic settings have one bucket: no batching, batches of 8 within 2 ms, of 32 within 2 ms,
    of 32 within 20 ms. Predictions may be off by 10 % in texts per second, by 20 % in the median.
    """
    set_up_logging("warning")
    with mistakes_in_one_line():
        effective = load_config(config, flags)
        from embedsvc.bench.sweep import Load, Sweep

        load = Load(texts_of(texts), rates, seconds, timeout_s, slo_ms / 1000)
        for line in Sweep(effective, load, points).lines():
            click.echo(line)


def texts_of(path: Path | None) -> list[str]:
    """Return the texts of a file, or the built-in ones."""
    from embedsvc.bench.texts import builtin_texts, read_texts

    return read_texts(path) if path else builtin_texts(2_000)


def rates_of(given: str | None) -> tuple[float, ...]:
    """Return the rates of a list separated by commas."""
    try:
        rates = tuple(float(rate) for rate in given.split(",")) if given else ()
    except ValueError:
        rates = (0.0,)
    if not all(1 <= rate < float("inf") for rate in rates):
        raise click.BadParameter(f"must be numbers from 1 up, separated by commas, got {given!r}")
    return tuple(sorted(rates))
