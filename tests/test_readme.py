"""README's commands are run as they stand, against the server that README starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedsvc.bench.serving import Server, running
from embedsvc.cli import main
from embedsvc.configfile import load
from embedsvc.errors import ConfigError
from embedsvc.keys import read_keys

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
URL = "http://127.0.0.1:8000"
# The set-up that make would do first has been done, or these tests would not run.
NO_SET_UP = ["-o", f"{sys.prefix}/.installed", f"VENV={sys.prefix}"]


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def shell_lines(prefix: str) -> list[str]:
    """Return the command lines of all sh blocks that start with a prefix, comments left out."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(prefix)]


def run(command: list[str], **environment: str) -> str:
    """Run a command from the root and return its stdout."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start README's first command, on a free port and with a home of its own."""
    home = tmp_path_factory.mktemp("home")
    environment = {"EMBEDSVC_PORT": "0", "HF_HUB_OFFLINE": "1", "HOME": str(home)}
    command = [*blocks("sh")[0].split(), "-C", str(ROOT), *NO_SET_UP]
    with running(command, environment) as it:
        yield it


@pytest.mark.timeout(120)
def test_serve_says_what_it_serves_and_how_to_try_it(server: Server) -> None:
    """The banner names model, device, dtype, slots, buckets and a command line."""
    for word in ("all-MiniLM-L6-v2", "cpu", "slots", "buckets", "256", "curl http"):
        assert word in server.banner


@pytest.mark.timeout(120)
def test_the_banners_curl_line_answers(server: Server) -> None:
    """The line to try, pasted into a shell, gives a vector."""
    line = server.banner[server.banner.index("curl") :]
    reply = json.loads(run(["bash", "-c", line.replace("curl", "curl -s", 1)]))

    assert len(reply["data"][0]["embedding"]) == 384


@pytest.mark.timeout(120)
def test_the_curl_command_answers(server: Server) -> None:
    """README's curl command gives one vector a text."""
    (line,) = shell_lines("curl")
    reply = json.loads(run(["bash", "-c", line.replace(URL, address(server))]))

    assert [len(item["embedding"]) for item in reply["data"]] == [384, 384]


@pytest.mark.timeout(120)
def test_the_openai_client_answers(server: Server) -> None:
    """README's Python runs as it stands and prints dimensions and tokens."""
    (script,) = blocks("python")
    out = run([sys.executable, "-c", script.replace(URL, address(server))])

    assert out == "384 5\n"


def address(server: Server) -> str:
    """Return where the server listens, as README writes it."""
    return f"http://{server.host}:{server.port}"


@pytest.mark.parametrize("line", shell_lines("embedsvc"))
def test_commands_have_these_flags(line: str) -> None:
    """Every embedsvc command line is one that the command line takes."""
    name, *arguments = shlex.split(line)[1:]

    main.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("line", shell_lines("make"))
def test_make_has_these_targets(line: str) -> None:
    """Every make command line names a target that exists."""
    assert run([*shlex.split(line), "--dry-run", *NO_SET_UP])


def test_the_configuration_example_is_legal(tmp_path: Path) -> None:
    """The TOML blocks load, and the mistake shown beside them is told in these words."""
    text, keys = blocks("toml")
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert load(path).models[0].versions[0].batching.buckets[-1] == 512

    path.write_text(re.sub(r"buckets = .*", "buckets = [64, 32]", text))
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert f"embedsvc: {refused.value}\n" in blocks("text")

    path.write_text(keys)
    assert len(read_keys(str(path))) == 1


def test_it_stays_short() -> None:
    """README fits into 250 lines and links only to files that exist."""
    links = re.findall(r"\]\((?!http)([^)#]+)", README)

    assert len(README.splitlines()) <= 250
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_module_named_in_the_tree_exists() -> None:
    """The tree of the source names what is there."""
    (tree,) = [block for block in blocks("text") if block.startswith("embedsvc/")]
    names = re.findall(r"^  ((?:\w+(?:\.py|/) ?)+)", tree, re.MULTILINE)
    listed = {name for line in names for name in line.split()}
    package = ROOT / "embedsvc"
    present = {p.name for p in package.glob("[!_]*.py")}
    present |= {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}

    assert listed == present
