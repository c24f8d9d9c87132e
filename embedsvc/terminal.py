"""What all commands share: flags, logging, and how mistakes and results are printed.

Only this module and the commands print.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from embedsvc.errors import EmbedsvcError

if TYPE_CHECKING:
    from embedsvc.config import Config

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(dir_okay=False, path_type=Path)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]
_SPELLED_OUT = {c: ascii(chr(c))[1:-1] for c in _CONTROLS if chr(c) not in "\t\n"}
# What flags set, as errors about values of any kind name it.
_FIELDS_OF_FLAGS = {
    "model": r"models\[0\]\.(source|name)",
    "host": r"server\.host",
    "port": r"server\.port",
    "workers": r"server\.workers",
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
        type=FILE,
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


def load_config(path: Path | None, flags: dict[str, Any]) -> Config:
    """Return the effective configuration of a file and the flags that were given."""
    from embedsvc.configfile import Overrides, load

    return load(path, Overrides(**flags))


def set_up_logging(level: str, who: str = "") -> None:
    """Log to stderr, libraries only from warnings up; `who` tells one process from others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Indented(_LOG_FORMAT.replace("%(levelname)s", f"{who}%(levelname)s")))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("embedsvc").setLevel(level.upper())


class Indented(logging.Formatter):
    """Lets an entry of the log begin only where it does, whatever words of others are in it.

    Further lines, as of tracebacks, are indented; other control characters are spelled out, since
    a terminal would obey them.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of one entry."""
        return super().format(record).translate(_SPELLED_OUT).replace("\n", "\n  ")


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Turn an error of ours into one line on stderr and exit status 1."""
    try:
        yield
    except EmbedsvcError as error:
        message = " ".join(str(error).splitlines())
        click.echo(f"embedsvc: {as_given(message)}", err=True)
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


def print_result(result: Any, as_json: bool) -> None:
    """Print a struct as JSON or as lines of name and value."""
    import msgspec

    values = msgspec.to_builtins(result)
    if as_json:
        click.echo(json.dumps(values))
        return
    for name, value in values.items():
        click.echo(f"{name:18} {value}")
