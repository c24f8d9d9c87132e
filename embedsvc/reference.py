"""Writes docs/reference.md from the code: `python -m embedsvc.reference > docs/reference.md`.

A test compares the file with what this module makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import click
import msgspec
from msgspec import Struct
from prometheus_client.metrics import MetricWrapperBase

from embedsvc.cli import main
from embedsvc.config import Config
from embedsvc.errors import RequestError
from embedsvc.fields import Field, fields
from embedsvc.keys import KeysFile
from embedsvc.metrics import VERSION_LABELS, Metrics, TextTokens

_HEAD = """\
# Reference

Made from the code by `python -m embedsvc.reference > docs/reference.md`; do not edit.
"""


def render() -> str:
    """Return the whole page."""
    parts = [_HEAD, *_config(), *_commands(), *_errors(), *_metrics()]
    return "\n".join(parts)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


# --- configuration ------------------------------------------------------------------------------


def _config() -> Iterator[str]:
    yield "## Configuration\n"
    yield "`embedsvc serve CONFIG.toml`; without a file the defaults serve all-MiniLM-L6-v2."
    yield "`embedsvc check CONFIG.toml` prints what a file amounts to, or which field is wrong.\n"
    yield from _sections(Config, "")
    yield "## API keys\n"
    yield "The TOML file that `server.keys_file` names. With it, every route but `/health`,"
    yield "`/health/…` and `/metrics` wants `Authorization: Bearer KEY`, or `api-key: KEY`."
    yield "Only the SHA-256 of keys is written down; make both with"
    yield '`key=$(openssl rand -hex 24); echo "$key"; printf %s "$key" | sha256sum`.'
    yield "Keys that send at the same time share the device by weight, however much each sends.\n"
    yield from _sections(KeysFile, "")


def _sections(section: type[Struct], prefix: str) -> Iterator[str]:
    for field in fields(section):
        if field.section is None:
            continue
        name = prefix + field.name
        many = field.required or field.default == []
        header = f"[[{name}]]" if many else f"[{name}]"
        yield f"### `{header}`\n"
        yield _summary(field.section) + "\n"
        own = [f for f in fields(field.section) if f.section is None]
        rows = ((f"`{f.name}`", f.kind, _default(f), f.description) for f in own)
        yield from _table(["key", "value", "default", "meaning"], rows)
        yield from _sections(field.section, f"{name}.")


def _default(field: Field) -> str:
    return "required" if field.required else f"`{msgspec.json.encode(field.default).decode()}`"


def _summary(cls: type) -> str:
    """Return the first line of the docstring, without the path that only the source needs."""
    line = (cls.__doc__ or "").strip().splitlines()[0]
    text = line.rpartition("`: ")[2]
    return text[0].upper() + text[1:]


# --- command line -------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield "## Command line\n"
    yield from _command(main, "embedsvc")


def _command(command: click.Command, name: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for child in (c for c in command.commands.values() if not c.hidden):
            yield from _command(child, f"{name} {child.name}")
        return
    arguments = [p.metavar or "" for p in command.params if isinstance(p, click.Argument)]
    yield f"### `{' '.join([name, *arguments])}`\n"
    yield (command.help or "").split("\n\n")[0].replace("\n", " ") + "\n"
    options = [p for p in command.params if isinstance(p, click.Option)]
    rows = ((f"`{p.opts[0]}`", f"`{p.envvar}`", p.help or "") for p in options)
    yield from _table(["flag", "environment", "meaning"], rows)


# --- errors -------------------------------------------------------------------------------------


def _errors() -> Iterator[str]:
    yield "## Errors\n"
    yield 'Every error is OpenAI\'s envelope `{"error": {message, type, param, code}}`.'
    yield "`reason` is the label of `embedsvc_requests_total`; `retry` is `x-should-retry`, where"
    yield "the server tells the client.\n"
    rows = (
        (str(e.status), e.type, e.code or "", e.reason, _retry(e), _summary(e))
        for e in sorted(_leaves(RequestError), key=lambda e: e.status)
    )
    yield from _table(["status", "type", "code", "reason", "retry", "when"], rows)


def _leaves(cls: type[RequestError]) -> Iterator[type[RequestError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _leaves(child)


def _retry(error: type[RequestError]) -> str:
    return "" if error.should_retry is None else str(error.should_retry).lower()


# --- metrics ------------------------------------------------------------------------------------


def _metrics() -> Iterator[str]:
    yield "## Metrics\n"
    yield "`GET /metrics`, Prometheus text format. Length classes are fixed, never learned.\n"
    yield from _table(["name", "type", "labels", "meaning"], map(_metric, _collectors()))


def _collectors() -> list[MetricWrapperBase | TextTokens]:
    # The registry's public face shows no labels before the first observation.
    found = Metrics().registry._collector_to_names
    return [c for c in found if isinstance(c, MetricWrapperBase | TextTokens)]


def _metric(found: MetricWrapperBase | TextTokens) -> tuple[str, str, str, str]:
    if isinstance(found, TextTokens):
        return f"`{found.name}`", "histogram", ", ".join(VERSION_LABELS), found.text
    name, labels = f"`{_sample_name(found)}`", ", ".join(found._labelnames)
    return name, str(found._type), labels, found._documentation


def _sample_name(metric: MetricWrapperBase) -> str:
    return f"{metric._name}_total" if metric._type == "counter" else metric._name


if __name__ == "__main__":
    sys.stdout.write(render())
