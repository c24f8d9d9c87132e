"""The command line: the only module that prints and sets up logging.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from embedsvc import __version__
from embedsvc.errors import EmbedsvcError

if TYPE_CHECKING:
    from embedsvc.config import Config

F = TypeVar("F", bound=Callable[..., Any])

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


# What flags set, as errors about values of any kind name it.
_FIELDS_OF_FLAGS = {
    "model": r"models\[0\]\.(source|name)",
    "host": r"server\.host",
    "port": r"server\.port",
    "device": r"models\[\d+\]\.versions\[0\]\.device",
}


def option(flag: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Declare a flag that also reads the environment variable EMBEDSVC_<FLAG>."""
    variable = _variable(flag.removeprefix("--"))
    return click.option(flag, *names, envvar=variable, **attributes)


def _variable(name: str) -> str:
    return "EMBEDSVC_" + name.replace("-", "_").upper()


def model_options(command: F) -> F:
    """Add the flags that change which model is loaded and how."""
    for declare in reversed(
        [
            option("--model", metavar="SOURCE", help="Serve this instead of the file's models: "
                   "a Hub id (optionally @REVISION), a folder, or package:NAME."),
            option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N."),
            option("--dtype", type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
                   help="Precision of the matrix products."),
            option("--backend", type=click.Choice(["auto", "torch", "hash"]),
                   help="hash needs no weights: for tests and demos."),
        ]
    ):  # fmt: skip
        command = declare(command)
    return command


def config_argument() -> Callable[[F], F]:
    """Add the configuration file, which EMBEDSVC_CONFIG can name too."""
    return click.argument(
        "config",
        metavar="[CONFIG.toml]",
        type=click.Path(dir_okay=False, path_type=Path),
        required=False,
        envvar="EMBEDSVC_CONFIG",
    )


log_level = option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severity of the log on stderr.",
)


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

            start = [sys.executable, "-m", "embedsvc.cli", "worker", "--log-level", log_level]
            supervise(effective, start, reread, print_ready)
        else:
            from embedsvc.http import server
            from embedsvc.service import Service

            service = Service(effective)
            server.serve(service, lambda url: print_ready(url, service.info()), reread)


@main.command(hidden=True)
@click.argument("number", type=int)
@click.argument("control", type=int)
@click.argument("listeners", type=int, nargs=-1)
@log_level
def worker(number: int, control: int, listeners: tuple[int, ...], log_level: str) -> None:
    """Be one of the processes of `serve --workers`, which gives it these file descriptors."""
    set_up_logging(log_level, f"worker {number} ")
    from embedsvc.supervisor.worker import run

    run(control, listeners)


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


@main.group()
def bench() -> None:
    """Measure this machine."""


@bench.command()
@config_argument()
@model_options
@option(
    "--texts",
    type=click.Path(dir_okay=False, path_type=Path),
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


def load_config(path: Path | None, flags: dict[str, Any]) -> Config:
    """Return the effective configuration of a file and the flags that were given."""
    from embedsvc.configfile import Overrides, load

    return load(path, Overrides(**flags))


def set_up_logging(level: str, who: str = "") -> None:
    """Log to stderr, libraries only from warnings up; `who` tells one process from others."""
    form = _LOG_FORMAT.replace("%(levelname)s", f"{who}%(levelname)s")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=form)
    logging.getLogger("embedsvc").setLevel(level.upper())


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn an error of ours into one line on stderr and exit status 1."""
    try:
        yield
    except EmbedsvcError as error:
        click.echo(f"embedsvc: {as_given(str(error))}", err=True)
        sys.exit(1)


def as_given(message: str) -> str:
    """Name flags and environment variables where a message begins with the fields they set."""
    where, colon, what = message.partition(": ")
    context = click.get_current_context()
    for name, field in _FIELDS_OF_FLAGS.items():
        source = context.get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            where = re.sub(field, f"--{name}", where)
        elif source is ParameterSource.ENVIRONMENT:
            where = re.sub(field, _variable(name), where)
    return where + colon + what


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


def print_result(result: Any, as_json: bool) -> None:
    """Print a struct as JSON or as lines of name and value."""
    import msgspec

    values = msgspec.to_builtins(result)
    if as_json:
        click.echo(json.dumps(values))
        return
    for name, value in values.items():
        click.echo(f"{name:18} {value}")


if __name__ == "__main__":
    main()
