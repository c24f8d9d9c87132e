"""Rows that break the model, among thousands: the innocent get their vectors, in bounded work."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from embedsvc.calls import EmbedCall, Embedded
from embedsvc.config import Config, DeviceConfig, ModelConfig, ServerConfig, VersionConfig
from embedsvc.errors import DeviceOutOfMemory, InferenceFailed
from embedsvc.models.buffers import HostBuffer, Ids, Vectors
from embedsvc.models.hashing import HashModel
from embedsvc.service import Service

NAME = "m"
# Ids of tokens that no innocent text has.
RAISES, NOT_FINITE = 998, 999
# The second and third token of a text tell its number, in this base.
BASE, ZERO = 5_000, 2_000
# Calls under way at once: enough that batches are full.
N_AT_ONCE = 1_500

Calls = list[list[list[int]]]


@dataclass(slots=True)
class Forward:
    """One run of the model: the numbers of its rows, and whether it went wrong."""

    rows: set[int]
    broke: bool = True


class PoisonedModel(HashModel):
    """Breaks on rows that carry a mark; remembers each run."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[Forward] = []

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute, then break what asks for it."""
        super().forward(buffer, rows, length)
        ids, output = buffer.grid(rows, length), buffer.output[:rows]
        numbers = (ids[:, 1] - ZERO) * BASE + ids[:, 2] - ZERO
        self.forwards.append(note := Forward(set(numbers.tolist())))
        self.spoil(ids, output)
        note.broke = not np.isfinite(output).all()

    def spoil(self, ids: Ids, output: Vectors) -> None:
        """Raise, or write what is no number."""
        if (ids == RAISES).any():
            raise RuntimeError("poisoned on purpose")
        output[(ids == NOT_FINITE).any(axis=1)] = np.nan


class SmallModel(PoisonedModel):
    """Has memory for the longest text, and for little more at once."""

    MOST_TOKENS = 60

    def spoil(self, ids: Ids, output: Vectors) -> None:
        """Run out of memory."""
        if ids.size > self.MOST_TOKENS:
            raise DeviceOutOfMemory("no room")


class PoisonedService(Service):
    """A service whose model is replaced once it is ready."""

    def __init__(self, cache: Path, model: PoisonedModel) -> None:
        super().__init__(
            Config(
                server=ServerConfig(cache_dir=str(cache)),
                devices=[DeviceConfig(name="cpu", slots=2, threads_per_slot=1)],
                models=[ModelConfig(name=NAME, versions=[VersionConfig(backend="hash")])],
            )
        )
        self.model = model

    async def start(self) -> None:
        """Become ready, then change the model."""
        await super().start()
        self._deployments[NAME].engine.model = self.model


@asynccontextmanager
async def serving(cache: Path, model: PoisonedModel) -> AsyncIterator[Service]:
    """Serve with a model; see afterwards that nothing is left behind."""
    service = PoisonedService(cache, model)
    await service.start()
    yield service
    await service.stop()
    left = service.info()["models"][0]["queue"]
    assert left == {"sequences": 0, "tokens": 0, "seconds": 0.0}


def calls_of(n_calls: int, share: float) -> Calls:
    """Return the token ids of calls of 1 to 3 texts, of which a share is marked."""
    rng, number = random.Random(1), 0
    calls: Calls = []
    for _ in range(n_calls):
        texts = []
        for _ in range(rng.randint(1, 3)):
            words = rng.choices(range(2_000, 30_000), k=rng.randint(1, 30))
            if rng.random() < share:
                words[rng.randrange(len(words))] = rng.choice((RAISES, NOT_FINITE))
            texts.append([101, ZERO + number // BASE, ZERO + number % BASE, *words, 102])
            number += 1
        calls.append(texts)
    return calls


async def answers(service: Service, calls: Calls) -> list[Embedded | InferenceFailed]:
    """Return how each call ended."""
    found: dict[int, Embedded | InferenceFailed] = {}
    waiting = iter(enumerate(calls))

    async def client() -> None:
        for index, texts in waiting:
            try:
                found[index] = await service.embed(EmbedCall(NAME, texts, normalize=False))
            except InferenceFailed as error:
                found[index] = error

    await asyncio.gather(*(client() for _ in range(N_AT_ONCE)))
    return [found[index] for index in range(len(calls))]


def own_vectors(calls: Calls) -> Iterator[Vectors]:
    """Yield the vectors of each call that its texts have by themselves."""
    texts = [ids for call in calls for ids in call]
    model, longest = HashModel(), max(map(len, texts))
    buffer = HostBuffer(len(texts) * longest, len(texts), model.dim, model.pad_id)
    buffer.fill([np.array(ids) for ids in texts], [0] * len(texts), longest)
    model.forward(buffer, len(texts), longest)
    rows = iter(buffer.output)
    for call in calls:
        yield np.stack([next(rows) for _ in call])


def check_bounded(forwards: list[Forward]) -> None:
    """Law: with n rows in batches that broke, those batches took less than 2·n runs.

    A run of rows that broke elsewhere belongs to their batch: a row is in one batch only.
    """
    broken = set[int]().union(*(forward.rows for forward in forwards if forward.broke))

    n_runs = sum(forward.rows <= broken for forward in forwards)
    assert 0 < n_runs < 2 * len(broken)


def marked(texts: list[list[int]]) -> set[int]:
    return {row for row, ids in enumerate(texts) if not {RAISES, NOT_FINITE}.isdisjoint(ids)}


@pytest.mark.timeout(60)
async def test_a_hundredth_is_poisoned_and_everyone_else_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 10,000 requests each gets its vectors, or an error that names a guilty text of its own."""
    caplog.set_level(logging.ERROR)
    calls = calls_of(10_000, share=0.01)
    model = PoisonedModel()
    async with serving(tmp_path, model) as service:
        found = await answers(service, calls)

    guilty = [marked(texts) for texts in calls]
    assert 150 < sum(map(bool, guilty)) < 250
    for own, rows, answer in zip(own_vectors(calls), guilty, found, strict=True):
        if rows:
            assert isinstance(answer, InferenceFailed)
            named = re.search(r"input\[(\d+)\]", answer.message)
            assert named
            assert int(named[1]) in rows
        else:
            assert isinstance(answer, Embedded)
            assert np.array_equal(answer.vectors, own)
    check_bounded(model.forwards)


async def test_no_memory_for_batches_is_nobodys_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While single texts fit, nobody hears that batches do not, and soon they are smaller."""
    caplog.set_level(logging.ERROR)
    calls = calls_of(2_000, share=0.0)
    model = SmallModel()
    async with serving(tmp_path, model) as service:
        found = await answers(service, calls)

    for own, answer in zip(own_vectors(calls), found, strict=True):
        assert isinstance(answer, Embedded)
        assert np.array_equal(answer.vectors, own)
    check_bounded(model.forwards)
    last = model.forwards[len(model.forwards) // 2 :]
    assert sum(forward.broke for forward in last) < len(last) / 3
