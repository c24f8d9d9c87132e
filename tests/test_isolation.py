"""Isolated models as a service runs them: the product's own process, by its configuration."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from sentence_transformers.sentence_transformer.modules import Pooling

from embedsvc.calls import EmbedCall
from embedsvc.config import (
    Config,
    DeviceConfig,
    ModelConfig,
    ServerConfig,
    VersionConfig,
)
from embedsvc.deployment import TRIES, deploy
from embedsvc.engine.device import Device
from embedsvc.engine.devices import Devices
from embedsvc.errors import ModelError, StartError
from embedsvc.loading import load
from embedsvc.metrics import Metrics
from embedsvc.models import Model, isolated, load_model
from embedsvc.models.cache import Cache
from embedsvc.models.source import resolve
from embedsvc.service import Service
from loadtest.isolation import recovery
from tests import tiny
from tests.isolated import processes

NAME = "m"
TEXTS = ["hello", "a longer text about nothing", "word " * 100]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache directory for the module, so that measurements are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process outlives its test."""
    yield

    assert processes() == []


def config_of(cache: Path, *, isolate: bool) -> Config:
    """Return a configuration of weightless vectors."""
    version = VersionConfig(backend="hash", isolate=isolate)
    return Config(
        server=ServerConfig(cache_dir=str(cache)),
        devices=[DeviceConfig(name="cpu", slots=2, threads_per_slot=1)],
        models=[ModelConfig(name=NAME, versions=[version])],
    )


@asynccontextmanager
async def serving(cache: Path, *, isolate: bool) -> AsyncIterator[Service]:
    """Run a service with weightless vectors."""
    service = Service(config_of(cache, isolate=isolate))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def test_a_service_with_isolated_models_gives_the_same_vectors(cache: Path) -> None:
    """Nobody sees where the model runs, measurements and warm-up included."""
    async with serving(cache, isolate=False) as service:
        here = await service.embed(EmbedCall(NAME, TEXTS))
        assert processes() == []
    async with serving(cache, isolate=True) as service:
        there = await service.embed(EmbedCall(NAME, TEXTS))
        assert len(processes()) == 1

    np.testing.assert_array_equal(here.vectors, there.vectors)


async def test_a_service_outlives_its_model(cache: Path) -> None:
    """While the process is replaced the service is not ready, but calls that can wait do."""
    async with serving(cache, isolate=True) as service:
        before = await service.embed(EmbedCall(NAME, TEXTS))
        (process,) = processes()
        process.kill()
        async with asyncio.timeout(10):
            while service.state != "restarting":  # noqa: ASYNC110  # another thread notices
                await asyncio.sleep(0)
        assert (service.ready, service.accepting) == (False, True)

        after = await service.embed(EmbedCall(NAME, TEXTS))

        assert service.ready
        np.testing.assert_array_equal(before.vectors, after.vectors)
        assert service.info()["models"][0]["state"] == "ready"


def test_a_start_that_fails_leaves_no_process(cache: Path) -> None:
    """A model that is loaded and then cannot be served is closed."""

    class NoDevices(Devices):
        def get(self, *args: object) -> NoReturn:
            assert len(processes()) == 1
            raise ModelError("no device")

    config = config_of(cache, isolate=True)
    with pytest.raises(ModelError, match="no device"):
        deploy(config.models[0], "models[0]", config, NoDevices(config), Metrics())

    assert processes() == []


class KillingDevices(Devices):
    """Ends the model's process the first times that somebody wants to use it.

    Attributes:
        n_kills: how often.
        signal: by which.
    """

    n_kills = 0
    signal = signal.SIGKILL

    def get(
        self, model: Model, version: VersionConfig, cache: Cache, key: dict[str, Any]
    ) -> Device:
        """End it, or be the device."""
        if self.n_kills:
            self.n_kills -= 1
            (process,) = processes()
            process.send_signal(self.signal)
        return super().get(model, version, cache, key)


def test_a_start_survives_that_its_process_is_killed(tmp_path: Path) -> None:
    """It begins anew."""
    config = config_of(tmp_path, isolate=True)
    with closing(KillingDevices(config)) as devices:
        devices.n_kills = TRIES - 1

        deploy(config.models[0], "models[0]", config, devices, Metrics()).engine.model.close()

        assert devices.n_kills == 0


@pytest.mark.parametrize(
    ("number", "n_tries"), [(signal.SIGKILL, TRIES), (signal.SIGSEGV, 1)], ids=["killed", "died"]
)
def test_a_start_whose_process_always_ends_fails(
    tmp_path: Path, number: signal.Signals, n_tries: int
) -> None:
    """With the path of the model, and nothing left; at once where it ended by itself."""
    config = config_of(tmp_path, isolate=True)
    with closing(KillingDevices(config)) as devices:
        devices.n_kills, devices.signal = TRIES, number

        with pytest.raises(ModelError, match=rf"^models\[0\]: .*{number.name}"):
            deploy(config.models[0], "models[0]", config, devices, Metrics())

        assert devices.n_kills == TRIES - n_tries


@pytest.mark.timeout(60)
async def test_clients_of_a_server_do_not_notice(tmp_path: Path) -> None:
    """kill -9 under load: every call gets its vectors, over HTTP, by the command line."""
    flags = ["--backend", "hash", "--log-level", "warning"]

    away, failures = await recovery(["some text"] * 50, flags, n_clients=4, n_kills=1)

    assert failures == {}
    assert len(away) == 1


@pytest.mark.timeout(120)
def test_torch_in_its_own_process_gives_the_same_vectors(tmp_path: Path) -> None:
    """Weights, threads and settings arrive there as they are here."""
    tiny.save_folder(tmp_path, "bert", Pooling(tiny.HIDDEN, "mean"))
    folder = resolve(str(tmp_path / "folder"))
    found = []
    for isolate in (False, True):
        version = VersionConfig(source=folder.source, device="cpu", isolate=isolate)
        model = load_model(version, folder, tmp_path)
        texts = tiny.texts((3, 20, 44))
        found.append((tiny.embed(model, folder, texts), dict(model.settings), model.pad_id))
        model.close()

    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


@pytest.mark.timeout(120)
def test_a_broken_tokenizer_leaves_no_process(tmp_path: Path) -> None:
    """It is read while the model is loaded; the start ends with its error."""
    tiny.save_folder(tmp_path, "bert", Pooling(tiny.HIDDEN, "mean"))
    short = VersionConfig(source=str(tmp_path / "folder"), device="cpu", max_length=1)
    with pytest.raises(StartError, match="max_length"):
        load(short, "models[0]", Cache(tmp_path))
    assert processes() == []

    for file in (tmp_path / "folder").rglob("tokenizer.json"):
        file.write_text("{")
    version = VersionConfig(source=str(tmp_path / "folder"), device="cpu")
    with pytest.raises(ModelError, match=r"models\[0\]: .*tokenizer"):
        load(version, "models[0]", Cache(tmp_path))
    assert processes() == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (VersionConfig(device="cuda"), True),
        (VersionConfig(device="cuda:1"), True),
        (VersionConfig(device="cpu"), True),
        (VersionConfig(device="cuda", isolate=False), False),
        (VersionConfig(backend="hash"), False),
        (VersionConfig(backend="hash", isolate=True), True),
        (VersionConfig(), True),
    ],
)
def test_models_are_isolated_unless_told_otherwise(version: VersionConfig, expected: bool) -> None:
    """What can fail for good is kept apart; what cannot is not."""
    assert isolated(version) is expected
