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


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@config_argument()
@model_options
@option(
    "--texts",
    type=FILE,
    help='JSONL file of {"text": …} rows; without it, 2,000 built-in texts.',
)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@log_level
def offline(
    config: Path | None, texts: Path | None, as_json: bool, log_level: str, **flags: Any
) -> None:
    """Measure the limit: the model on length-sorted batches, without HTTP and queue."""
    set_up_logging(log_level)
    with mistakes_in_one_line():
        effective = load_config(config, flags)
        from embedsvc.bench.texts import builtin_texts, read_texts

        rows = read_texts(texts) if texts else builtin_texts(2_000)
        from embedsvc.bench.offline import run_offline

        print_result(run_offline(effective, rows), as_json)


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
