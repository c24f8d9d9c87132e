"""The command line.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedsvc import __version__
from embedsvc.bench.commands import bench
from embedsvc.terminal import (
    FILE,
    config_argument,
    load_config,
    log_level,
    mistakes_in_one_line,
    model_options,
    option,
    set_up_logging,
)

if TYPE_CHECKING:
    from embedsvc.config import Config


@click.group(context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="embedsvc")
def main() -> None:
    """Serve text embeddings over OpenAI's API, batched by sequence length."""


@main.command()
@config_argument()
@model_options
@option("--host", help="Address to listen on.")
@option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@option("--workers", type=click.IntRange(1, 64), help="HTTP processes on the address.")
@log_level
def serve(config: Path | None, log_level: str, **flags: Any) -> None:
    """Serve until SIGTERM; without a file and flags, all-MiniLM-L6-v2 on 127.0.0.1:8000.

    SIGHUP reads file and environment again.
    """
    set_up_logging(log_level)
    # Until the server takes the signals over: the kernel drops what the first process of a
    # container does not handle, and the imports take seconds.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with mistakes_in_one_line():
        effective = load_config(config, flags)

        def reread() -> Config:
            return load_config(config, flags)

        if effective.server.workers > 1:
            from embedsvc.supervisor.supervisor import supervise

            start = [sys.executable, "-P", "-m", "embedsvc.cli", "worker"]
            start += ["--log-level", log_level]
            supervise(effective, start, reread, print_ready)
        else:
            from embedsvc.http import server
            from embedsvc.service import Service

            service = Service(effective)
            server.serve(service, lambda url: print_ready(url, service.info()), reread)


@main.command(hidden=True)
@click.argument("number", type=int)
@click.argument("control", type=int)
@click.argument("wishes", type=int)
@click.argument("listeners", type=int, nargs=-1)
@log_level
def worker(
    number: int, control: int, wishes: int, listeners: tuple[int, ...], log_level: str
) -> None:
    """Be one of the processes of `serve --workers`, which gives it these file descriptors."""
    set_up_logging(log_level, f"worker {number} ")
    from embedsvc.supervisor.worker import run

    run(control, wishes, listeners)


@main.command()
@config_argument()
@model_options
@option("--config-only", is_flag=True, help="Do not load the model.")
@log_level
def check(config: Path | None, config_only: bool, log_level: str, **flags: Any) -> None:
    """Print the effective configuration, then load the model and verify its vectors.

    A mistake in the file is printed with the path of its field. The exit status is 1 after a
    mistake, or where vectors have moved since they were first checked.
    """
    set_up_logging(log_level)
    with mistakes_in_one_line():
        effective = load_config(config, flags)
        import msgspec

        from embedsvc.keys import read_keys

        read_keys(effective.server.keys_file)
        click.echo(msgspec.toml.encode(effective).decode(), nl=False)
        if config_only:
            return
        from embedsvc.verification import verify

        right = True
        for as_before, line in verify(effective):
            click.echo(f"# {line}")
            right &= as_before
    sys.exit(not right)


@main.command()
@config_argument()
@model_options
@option("--from-metrics", metavar="URL", help="Lengths of the texts a running server has had.")
@option("--lengths", type=FILE, help="Lengths in tokens, one a line, or LENGTH,COUNT.")
@option("--texts", type=FILE, help='Texts, one a line, or JSONL rows {"text": …}.')
@option("--slo-ms", type=click.FloatRange(1), default=250.0, show_default=True,
        help="Wanted 99th percentile of the latency.")  # fmt: skip
@option("--rate", type=click.FloatRange(0, min_open=True), help="Texts per second to serve.")
@option("--overhead-ms", type=click.FloatRange(0), default=1.0, show_default=True,
        help="What HTTP and tokenizing add to a request.")  # fmt: skip
@option("--simulated", type=click.IntRange(100), default=3_000, show_default=True,
        help="Texts of one simulation; more take longer and err less.")  # fmt: skip
@option("--output", type=FILE, help="Write the proposed configuration here.")
@option("--report", type=FILE, help="Write an HTML report here.")
@option("--points", type=FILE, help="Points of `bench sweep` to lay over the predictions.")
@log_level
def tune(
    config: Path | None,
    from_metrics: str | None,
    lengths: Path | None,
    texts: Path | None,
    slo_ms: float,
    rate: float | None,
    overhead_ms: float,
    simulated: int,
    output: Path | None,
    report: Path | None,
    points: Path | None,
    log_level: str,
    **flags: Any,
) -> None:
    """Propose batching settings for the lengths that arrive, the latency wanted, and this device.

    Give the lengths by one of --from-metrics, --lengths and --texts. Measures the first model's
    costs where they are not known yet, simulates, and prints what it found.
    """
    set_up_logging(log_level)
    with mistakes_in_one_line():
        effective = load_config(config, flags)
        from embedsvc.recommendation import Targets, check_writable, recommend
        from embedsvc.tuning.sources import Source

        check_writable(output=output, report=report)
        targets = Targets(slo_ms / 1000, rate, overhead_ms / 1000, simulated)
        result = recommend(effective, Source(from_metrics, lengths, texts), targets, points)
        result.write(output, report)
    click.echo("\n".join(result.lines()))


@main.command()
@config_argument()
@option("--host", help="Address it listens on.")
@option("--port", type=click.IntRange(1, 65535), help="Its port.")
def health(config: Path | None, **flags: Any) -> None:
    """Ask the server on this machine whether it is ready; the exit status is 1 where it is not.

    File and environment are read as by `serve`, so that it is asked where it listens.
    """
    with mistakes_in_one_line():
        server = load_config(config, flags).server
        from embedsvc.http.probe import probe

        is_ready, state = probe(server)
    click.echo(state, err=not is_ready)
    sys.exit(not is_ready)


main.add_command(bench)


def print_ready(url: str, info: dict[str, Any]) -> None:
    """Print what is served, and a command to try it with."""
    lines = [f"embedsvc {info['version']} ready on {url}"]
    for model in info["models"]:
        names = ", ".join([model["id"], *model["aliases"]])
        lines += [
            f"  model    {names} ({model['source']}), {model['dim']} dimensions, "
            f"up to {model['max_length']} tokens",
            f"  device   {model['device']}, {model['dtype']}, slots {model['slots']}, "
            f"threads per slot {model['threads_per_slot']}, "
            f"max_batch_tokens {model['max_batch_tokens']}",
            f"  buckets  {' '.join(map(str, model['buckets']))}",
        ]
    body = json.dumps({"model": info["models"][0]["id"], "input": "Hello, world"})
    reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    lines += [
        f"  try      curl {reachable}/v1/embeddings -H 'content-type: application/json' -d '{body}'"
    ]
    click.echo("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
