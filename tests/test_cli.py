"""The command line, as a user's shell sees it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from embedsvc.cli import main
from embedsvc.configfile import load

HEAVY = {"torch", "transformers", "litestar", "uvicorn", "numpy", "msgspec"}


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Undo what commands run in this process do to the log level."""
    yield
    logging.getLogger("embedsvc").setLevel(logging.NOTSET)


def embedsvc(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run the command in this process; return its exit status, stdout and stderr."""
    done = CliRunner().invoke(main, [str(a) for a in arguments], env=environment)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def test_help_needs_nothing_heavy() -> None:
    """`embedsvc --help` imports none of the libraries that take long."""
    script = (
        "import sys, embedsvc.cli\n"
        "try: embedsvc.cli.main(['--help'])\n"
        f"except SystemExit: print({HEAVY!r} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stderr == "set()\n"
    for command in ("serve", "check", "bench"):
        assert f"\n  {command}" in done.stdout


def test_check_prints_the_effective_configuration(tmp_path: Path) -> None:
    """The output is a file that means the same as file and flags together."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\nsource = "org/m"')

    status, out, _ = embedsvc("check", path, "--config-only", "--dtype", "float32")

    assert status == 0
    path.write_text(out)
    version = load(path).models[0].versions[0]
    assert (version.source, version.dtype) == ("org/m", "float32")


def test_check_tells_a_mistake_in_one_line(tmp_path: Path) -> None:
    """A wrong file gives exit status 1 and the field's path, and no traceback."""
    path = tmp_path / "config.toml"
    path.write_text("[server]\nport = -1")

    status, out, err = embedsvc("check", path)

    assert (status, out) == (1, "")
    assert err == "embedsvc: server.port: must be an integer from 0 to 65535, got -1\n"


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("EMBEDSVC_MODEL", "org/other", 'source = "org/other"'),
        ("EMBEDSVC_DTYPE", "float32", 'dtype = "float32"'),
        ("EMBEDSVC_DEVICE", "cuda:1", 'device = "cuda:1"'),
        ("EMBEDSVC_BACKEND", "hash", 'backend = "hash"'),
    ],
)
def test_every_model_flag_reads_the_environment(
    tmp_path: Path, variable: str, value: str, line: str
) -> None:
    """A variable EMBEDSVC_<FLAG> is the same as the flag."""
    path = tmp_path / "config.toml"
    path.write_text("")

    status, out, _ = embedsvc("check", path, "--config-only", **{variable: value})

    assert status == 0
    assert line in out.splitlines()


def test_a_model_that_is_not_there_ends_serve_in_one_line(tmp_path: Path) -> None:
    """`serve` with a folder that does not exist says so on stderr and exits with 1."""
    serve = [sys.executable, "-m", "embedsvc.cli", "serve", "--port", "0", "--log-level", "error"]
    done = subprocess.run(
        [*serve, "--model", str(tmp_path / "absent")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("embedsvc: models[0]")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"text": 3}'])
def test_bench_refuses_texts_that_are_none(tmp_path: Path, text: str) -> None:
    """A texts file without rows of `{"text": …}` is told in one line."""
    path = tmp_path / "texts.jsonl"
    path.write_text(text)

    status, out, err = embedsvc("bench", "offline", "--backend", "hash", "--texts", path)

    assert (status, out) == (1, "")
    assert err.startswith(f"embedsvc: --texts: {path} ")


def test_bench_offline_counts_every_text_and_token(tmp_path: Path) -> None:
    """The offline limit reports texts, tokens with specials, and rates that agree with them."""
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "one two three"}\n{"text": "one", "other": 1}\n')

    flags = ["--backend", "hash", "--json", "--texts", str(path)]
    status, out, _ = embedsvc("bench", "offline", *flags, HOME=str(tmp_path))
    result = json.loads(out)

    assert status == 0
    assert (result["texts"], result["tokens"]) == (2, 8)
    assert result["texts_per_s"] == pytest.approx(2 / result["seconds"], rel=0.1)
    assert 0 <= result["padding"] < 1


def test_serve_ends_with_status_0_after_sigterm(tmp_path: Path) -> None:
    """`serve` prints its address once ready, and SIGTERM is a regular end."""
    command = [sys.executable, "-m", "embedsvc.cli", "serve", "--port", "0", "--backend", "hash"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.terminate()
        _, log = process.communicate(timeout=15)

    assert re.fullmatch(r"embedsvc \S+ ready on http://127\.0\.0\.1:[1-9]\d+\n", first)
    assert process.returncode == 0
    assert "Traceback" not in log


def test_a_signal_before_the_server_listens_ends_serve(tmp_path: Path) -> None:
    """SIGTERM is a regular end from the first moment; here it reads its configuration."""
    config = tmp_path / "config.toml"
    os.mkfifo(config)
    command = [sys.executable, "-m", "embedsvc.cli", "serve", str(config)]
    with subprocess.Popen(command) as process, config.open("wb"):
        process.terminate()

        assert process.wait(10) == 0
