"""A configuration that changes under a running server: what it takes over, and what it says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec.structs import replace

from embedsvc.changes import LIVE, changes, differences
from embedsvc.config import (
    BatchingConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    ServerConfig,
    VersionConfig,
)
from embedsvc.errors import ConfigError
from embedsvc.fields import fields


def config(
    server: ServerConfig | None = None, batching: BatchingConfig | None = None, n_models: int = 1
) -> Config:
    """Return a configuration as it is after loading."""
    version = VersionConfig(backend="hash", batching=batching or BatchingConfig())
    models = [ModelConfig(name=f"m{i}", versions=[version]) for i in range(n_models)]
    return Config(server=server or ServerConfig(), models=models)


def test_the_same_configuration_changes_nothing() -> None:
    """Neither now nor after a restart."""
    assert changes(config(), config()) == (config(), [], [])


def test_live_fields_are_taken_over_and_others_wait() -> None:
    """What is gone on with has the first and not the second, and both are named."""
    fresh = config(
        ServerConfig(port=1, timeout_s=7.0, slow_request_s=1.0), BatchingConfig(max_age_s=9.0)
    )

    found = changes(config(), fresh)

    assert found.config == config(ServerConfig(timeout_s=7.0, slow_request_s=1.0))
    assert found.applied == ["server.timeout_s", "server.slow_request_s"]
    assert found.deferred == ["server.port", "models[0].versions[0].batching.max_age_s"]


def test_a_live_value_that_does_not_suit_the_rest_of_the_running_configuration_is_refused() -> None:
    """Larger requests need a larger queue, which needs a restart."""
    fresh = config(ServerConfig(max_inputs=9000), BatchingConfig(max_queue_sequences=9000))

    with pytest.raises(ConfigError, match=r"max_queue_sequences: must be at least .*9000"):
        changes(config(), fresh)


def test_tables_that_come_or_go_are_named() -> None:
    """By their place in the list."""
    more = replace(config(n_models=2), devices=[DeviceConfig()])

    assert list(differences("", config(), more)) == ["devices[0]", "models[1]"]
    assert list(differences("", more, config())) == ["devices[0]", "models[1]"]


def test_live_fields_exist() -> None:
    """A renamed field is noticed."""
    assert {field.name for field in fields(ServerConfig)} >= LIVE


# --- a process -----------------------------------------------------------------------------------


class Run:
    """A server in a process of its own, with a configuration file that a test may rewrite."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "config.toml"
        self.write("")
        self.child = subprocess.Popen(
            [sys.executable, "-m", "embedsvc.cli", "serve", "--port", "0", str(self._file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HOME": str(folder), "EMBEDSVC_BACKEND": "hash"},
        )
        self.url = self._line(self.child.stdout, r"ready on (http://\S+)")

    def write(self, server: str) -> None:
        """Change the file."""
        self._file.write_text(f"[server]\n{server}\n")

    def hang_up(self) -> str:
        """Have the file read again; return what is said about it."""
        self.child.send_signal(signal.SIGHUP)
        return self._line(self.child.stderr, r"(configuration .*)")

    def said(self, pattern: str) -> str:
        """Wait for a line of the log."""
        return self._line(self.child.stderr, pattern)

    def status(self, key: str) -> int:
        """Return how the models are shown to somebody with this key."""
        request = urllib.request.Request(f"{self.url}/v1/models", headers={"api-key": key})
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    def limits(self) -> dict[str, Any]:
        """Return the limits that the server shows."""
        with urllib.request.urlopen(f"{self.url}/info", timeout=10) as reply:
            limits: dict[str, Any] = json.load(reply)["limits"]
        return limits

    def _line(self, stream: IO[str] | None, pattern: str) -> str:
        assert stream is not None
        for line in stream:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"the process ended without {pattern!r}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Yield a server for all tests; kill it at the end."""
    run = Run(tmp_path_factory.mktemp("server"))
    with run.child:
        yield run
        run.child.kill()


def test_sighup_takes_over_what_it_can_and_a_mistake_changes_nothing(run: Run) -> None:
    """The log names the fields; the server goes on in any case."""
    run.write('max_inputs = 7\nslow_request_s = 1.0\ncache_dir = "elsewhere"')
    first = run.hang_up()
    deferred = run.said(r"these need a restart, the old values stay: (.*)")
    limits = run.limits()
    run.write("max_inputs = 0")
    second = run.hang_up()

    assert first == "configuration read again changed=server.max_inputs server.slow_request_s"
    assert deferred == "server.cache_dir"
    assert limits["max_inputs"] == 7
    assert second.endswith("server.max_inputs: must be an integer of at least 1, got 0")
    assert run.limits() == limits


def test_sighup_changes_keys_and_a_mistake_keeps_the_former(run: Run, tmp_path: Path) -> None:
    """A key that was added is let in, one that was taken out is not."""
    keys = tmp_path / "keys.toml"

    def let_in(key: str) -> str:
        digest = hashlib.sha256(key.encode()).hexdigest()
        keys.write_text(f'[[keys]]\nname = "n"\nsha256 = "{digest}"')
        return run.hang_up()

    run.write(f'keys_file = "{keys}"')
    let_in("old")
    first = [run.status(key) for key in ("old", "new")]
    let_in("new")
    second = [run.status(key) for key in ("old", "new")]
    keys.write_text("[[keys]]")
    said = run.hang_up()

    assert (first, second) == ([200, 401], [401, 200])
    assert said.endswith(f"server.keys_file: {keys}: keys[0].name: is required. Whose it is: shown "
                         "in the log, unlike the key.")  # fmt: skip
    assert [run.status(key) for key in ("old", "new")] == [401, 200]
