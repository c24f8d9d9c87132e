"""The command line, as a user's shell sees it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embedsvc.configfile import load
from tests.terminal import embedsvc

HEAVY = {"torch", "transformers", "litestar", "uvicorn", "numpy", "msgspec"}


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


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("model", "./absent", "there is no folder './absent'"),
        ("model", "/", "must be a string without spaces"),
        ("device", "tpu", "must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_a_mistake_is_told_of_what_was_written(flag: str, value: str, told: str) -> None:
    """A flag or a variable is named in the place of the field that it sets."""
    variable = f"EMBEDSVC_{flag.upper()}"

    _, _, err = embedsvc("check", f"--{flag}", value)
    assert err.startswith(f"embedsvc: --{flag}: {told}")
    _, _, err = embedsvc("check", **{variable: value})
    assert err.startswith(f"embedsvc: {variable}: {told}")


def test_a_mistake_in_a_file_is_told_of_the_file_beside_flags(tmp_path: Path) -> None:
    """Only what a flag sets is named by the flag."""
    path = tmp_path / "config.toml"
    path.write_text('[[models]]\nname = "m"\nsource = "./absent"')

    _, _, err = embedsvc("check", path, "--device", "cpu")
    assert err.startswith("embedsvc: models[0].source: there is no folder")


def refused(*arguments: str, **environment: str) -> str:
    """Run `serve` in a process of its own, which must refuse in one line; return the line."""
    serve = [sys.executable, "-m", "embedsvc.cli", "serve", "--log-level", "error"]
    done = subprocess.run(
        [*serve, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_model_that_is_not_there_ends_serve_in_one_line(tmp_path: Path) -> None:
    """`serve` with a folder that does not exist says so on stderr and exits with 1."""
    line = refused("--port", "0", "--model", str(tmp_path / "absent"))

    assert line.startswith("embedsvc: --model: there is no folder")


def test_an_address_in_use_ends_serve_in_one_line() -> None:
    """The user learns what to change, under the name that was used."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("--host", "127.0.0.1", EMBEDSVC_PORT=port)

    assert line.startswith("embedsvc: --host, EMBEDSVC_PORT: cannot listen on 127.0.0.1:")


def test_nothing_in_the_log_can_pass_for_an_entry_of_its_own() -> None:
    """Words of clients and of libraries are kept to their lines, and terminals do not obey them."""
    script = (
        "import logging\n"
        "from embedsvc.terminal import set_up_logging\n"
        "set_up_logging('info')\n"
        "forged = '2026-01-01 00:00:00,000 INFO embedsvc all is well'\n"
        "log = logging.getLogger('embedsvc.test')\n"
        "log.info('said %s', f'a\\n{forged}\\rb\\x1b[2J\\x85c\\u2028d\\te')\n"
        "try: raise ValueError(f'x\\n{forged}')\n"
        "except ValueError: log.exception('failed')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    lines = done.stderr.split("\n")

    assert [line.split(" ", 2)[2] for line in lines if line[:1].isdigit()] == [
        "INFO embedsvc.test said a",
        "ERROR embedsvc.test failed",
    ]
    assert r"all is well\rb\x1b[2J\x85c\u2028d" in lines[1]
    assert lines[1].endswith("d\te")


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
