"""Builds the image of `Containerfile` with podman and runs it as strictly as it may be run.

No registry is needed: a Debian with Python, made from Debian's own packages, stands in for the base
image. TEST_IMAGE names an image that is there already, to run that instead.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A tag of this run alone: two runs on one machine must not remove each other's image.
IMAGE = os.environ.get("TEST_IMAGE", f"localhost/embedsvc-test-{os.getpid()}")
STAND_IN = "localhost/embedsvc-test-base:bookworm"
_PACKAGES = "ca-certificates,python3-pip,python3-venv"
_PATH = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin"
# Podman's own limits are higher than what every root may set.
_LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
# Nothing can be written but the image's own volume, and nothing outside can be reached.
_STRICT = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--network=none",
)


def missing_tools() -> list[str]:
    """Return the programs that are not installed."""
    return [tool for tool in ("podman", "mmdebstrap") if shutil.which(tool) is None]


def podman(*arguments: str) -> str:
    """Run podman and return its stdout.

    Raises:
        AssertionError: it failed; with what it said.
    """
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _command(*arguments: str) -> list[str]:
    # crun, which podman prefers, does not run where control groups of both kinds are mounted.
    runtime = ["--runtime", "runc"] if shutil.which("runc") else []
    return ["podman", *runtime, *arguments]


# --- the image -----------------------------------------------------------------------------------


@contextmanager
def built(folder: Path) -> Iterator[None]:
    """Build `IMAGE`, remove it at the end; minutes, for torch is installed from the package index.

    Args:
        folder: an empty one for temporary files.
    """
    if "TEST_IMAGE" in os.environ:
        yield
        return
    _build(folder)
    yield
    podman("rmi", "--force", IMAGE)


def _build(folder: Path) -> None:
    podman(
        "build",
        "--layers=false",
        "--format=docker",
        "--network=host",
        *_LIMITS,
        *_pip_settings(folder / "pip.conf"),
        f"--build-arg=BASE={_base(folder / 'base.tar')}",
        f"--build-arg=TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}",
        f"--tag={IMAGE}",
        str(ROOT),
    )


def inspect() -> dict[str, Any]:
    """Return how the image says it is run."""
    described = json.loads(podman("image", "inspect", IMAGE))[0]
    config: dict[str, Any] = described["Config"] | {"Healthcheck": described["Healthcheck"]}
    return config


def _base(archive: Path) -> str:
    """Return the stand-in, made anew unless it is still there."""
    if not podman("images", "--quiet", STAND_IN):
        suite = STAND_IN.rpartition(":")[2]
        subprocess.run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={_PACKAGES}",
                suite,
                archive,
            ],
            check=True,
        )
        podman("import", f"--change=ENV=PATH={_PATH}", str(archive), STAND_IN)
        archive.unlink()
    return STAND_IN


def _pip_settings(path: Path) -> list[str]:
    """Write this machine's settings of pip and return podman's options to build with them."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    settings: dict[str, str] = {}
    # Variables of the environment, listed under `:env:`, win over files.
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):
        name, value = line.split("=", 1)
        settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    lines = (f"{name} = {' '.join(value.split())}\n" for name, value in settings.items())
    path.write_text("[global]\n" + "".join(lines))
    # What the settings point to: certificates, constraints, folders of packages.
    words = {word for value in settings.values() for word in value.split()}
    files = {Path(word) for word in words if word.startswith("/")}
    files |= {
        Path(word.removeprefix("file://")).parent for word in words if word.startswith("file:")
    }
    mounts = {path: "/etc/pip.conf"} | {file: str(file) for file in files if file.exists()}
    return [f"--volume={source}:{target}:ro" for source, target in mounts.items()]


# --- containers ----------------------------------------------------------------------------------


class Container:
    """A container that runs `embedsvc serve`."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._log = subprocess.Popen(
            _command("logs", "--follow", identity),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self, part: str) -> str:
        """Return the next line it says with these words in it."""
        assert self._log.stdout is not None
        said = ""
        for line in self._log.stdout:
            if part in line:
                return line.strip()
            said += line
        raise AssertionError(f"it ended without saying {part!r}:\n{said}")

    def run(self, *command: str) -> str:
        """Run a command beside the server and return its stdout."""
        return podman("exec", self.identity, *command)

    def check_health(self) -> None:
        """Run the image's health check.

        Raises:
            AssertionError: the server is not healthy.
        """
        podman("healthcheck", "run", self.identity)

    def terminate(self) -> None:
        """Send SIGTERM to the server, the first process."""
        podman("kill", "--signal=TERM", self.identity)

    def exit_status(self) -> int:
        """Wait for the end."""
        return int(podman("wait", self.identity))

    def close(self) -> None:
        """Remove it with its volumes, running or not."""
        podman("rm", "--force", "--time=0", "--volumes", self.identity)
        self._log.communicate(timeout=10)


@contextmanager
def serving(*options: str) -> Iterator[Container]:
    """Start a container of `IMAGE` with these options of podman; remove it at the end."""
    identity = podman("run", "--detach", *_STRICT, *_LIMITS, *options, IMAGE).strip()
    container = Container(identity)
    try:
        yield container
    finally:
        container.close()


def run_once(*command: str) -> str:
    """Run another program of the image as root, who sees everything; return its stdout."""
    name, *arguments = command
    options = ["--rm", "--user=0", "--network=none", *_LIMITS, f"--entrypoint={name}"]
    return podman("run", *options, IMAGE, *arguments)
