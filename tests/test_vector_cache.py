"""The vector cache: exact, least recently used goes first, within its memory; and through HTTP."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.calls import EmbedCall
from embedsvc.engine.sequence import Sequence
from embedsvc.errors import InferenceFailed
from embedsvc.metrics import Metrics
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.hashing import HashModel
from embedsvc.service import Service
from embedsvc.vector_cache import VectorCache
from tests.fakes import make_request
from tests.http_fakes import URL, client_of
from tests.test_service import NAME, make_config


def make_cache(max_bytes: int) -> VectorCache:
    return VectorCache(max_bytes, Metrics().version("m", "v1"))


def rows(*ids: list[int], prompt_length: int = 0, vector: float = -1.0) -> list[Sequence]:
    """Return the rows of a request whose vectors are all this."""
    request, sequences = make_request([len(one) for one in ids])
    request.vectors[:] = vector
    for sequence, one in zip(sequences, ids, strict=True):
        sequence.input_ids = np.array(one, np.int64)
        sequence.prompt_length = prompt_length
    return sequences


texts = st.lists(st.integers(0, 3), min_size=1, max_size=3)
looked_up = st.lists(st.tuples(texts, st.integers(0, 2)), max_size=60)


@given(looked_up, st.integers(1, 8))
def test_the_last_used_texts_are_known_and_no_other(
    lookups: list[tuple[list[int], int]], n_held: int
) -> None:
    """Law: what is found is what an LRU of so many entries holds, with the vector first stored."""
    # Every key has room for three ids, so that all entries are as large.
    one = make_cache(1 << 20)
    one.store(rows([0, 0, 0]))
    cache, model = make_cache(n_held * one.n_bytes), OrderedDict[tuple[object, ...], float]()
    for number, (ids, prompt_length) in enumerate(lookups):
        key = ([0] * 3 + ids)[-3:]
        (row,) = missing = rows(key, prompt_length=prompt_length, vector=number)
        missing = cache.fill(missing)
        cache.store(missing)

        expected = model.pop((*key, prompt_length), None)
        assert bool(missing) is (expected is None)
        model[(*key, prompt_length)] = number if expected is None else expected
        if len(model) > n_held:
            model.popitem(last=False)
        assert row.request.vectors[0].tolist() == [model[(*key, prompt_length)]] * 4


@settings(max_examples=5)
@given(st.integers(0, 2**32))
def test_memory_stays_within_the_bound(seed: int) -> None:
    """Law: whatever the sizes, what the process allocates for the cache is within its bytes."""
    rng, max_bytes = np.random.default_rng(seed), 200_000
    cache = make_cache(max_bytes)
    stored = [rows(rng.integers(0, 30_000, rng.integers(1, 200)).tolist()) for _ in range(400)]
    gc.collect()
    tracemalloc.start()
    for row in stored:
        cache.store(row)
        assert cache.n_bytes <= max_bytes
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert 0.3 * max_bytes < used <= max_bytes


def test_ids_and_prompt_make_the_key() -> None:
    """Neither a prefix nor another prompt length is the same text."""
    cache = make_cache(1 << 20)
    cache.store(rows([1, 2, 3], prompt_length=1))

    assert cache.fill(rows([1, 2, 3], prompt_length=1)) == []
    for other in (rows([1, 2, 3]), rows([1, 2], prompt_length=1), rows([1, 2, 3, 0])):
        assert cache.fill(other) == other


def test_a_cache_of_nothing_counts_nothing() -> None:
    """Where it is off, every text is computed and no lookup is counted."""
    metrics = Metrics()
    cache, row = VectorCache(0, metrics.version("m", "v1")), rows([1])

    cache.store(row)

    assert cache.fill(row) is row
    labels = {"model": "m", "version": "v1", "result": "miss"}
    assert metrics.registry.get_sample_value("embedsvc_cache_texts_total", labels) == 0


# --- in a service ---------------------------------------------------------------------------------


class NanModel(HashModel):
    """Vectors that are not finite for rows that begin with 101."""

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute, then break what asks for it."""
        super().forward(buffer, rows, length)
        buffer.output[:rows][buffer.grid(rows, length)[:, 0] == 101] = np.nan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for the module, so that measurements are made once."""
    return tmp_path_factory.mktemp("cache")


async def start(folder: Path) -> Service:
    service = Service(make_config(folder, cache_mib=1))
    await service.start()
    return service


def value(service: Service, name: str, **labels: str) -> float:
    labels = {"model": NAME, "version": "v1", **labels}
    return service.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_only_unknown_texts_reach_the_engine(folder: Path) -> None:
    """Known rows are filled in, bit for bit, beside those that are computed; room is given back."""
    service = await start(folder)
    first = await service.embed(EmbedCall(NAME, ["one", "two"]))

    mixed = await service.embed(EmbedCall(NAME, ["three", "two", "one"]))
    known = await service.embed(EmbedCall(NAME, ["two", "three"], normalize=False))

    assert mixed.vectors[[2, 1]].tobytes() == first.vectors.tobytes()
    assert mixed.prompt_tokens == first.prompt_tokens + 3
    assert (known.queue_s, known.inference_s) == (0.0, 0.0)
    hits, misses = (value(service, "embedsvc_cache_texts_total", result=r) for r in ("hit", "miss"))
    assert (hits, misses) == (4, 3)
    assert value(service, "embedsvc_texts_total", outcome="ok") == 7
    assert value(service, "embedsvc_cache_bytes") > 3 * 4 * 384
    queue = service.info()["models"][0]["queue"]
    assert queue == {"sequences": 0, "tokens": 0, "seconds": 0.0}
    # Batches are counted behind their answers.
    await service.stop()
    assert value(service, "embedsvc_batch_rows_sum") == 3


async def test_what_failed_is_not_kept(folder: Path) -> None:
    """A vector that is not finite, and the others of its request, are computed again."""
    service = await start(folder)
    (deployment,) = service._deployments.values()
    hashing = deployment.engine.model
    deployment.engine.model = NanModel()
    with pytest.raises(InferenceFailed, match="not finite"):
        await service.embed(EmbedCall(NAME, [[101], [102]], add_special_tokens=False))

    deployment.engine.model = hashing
    again = await service.embed(EmbedCall(NAME, [[101], [102]], add_special_tokens=False))

    assert np.isfinite(again.vectors).all()
    assert value(service, "embedsvc_cache_texts_total", result="hit") == 0
    assert value(service, "embedsvc_cache_texts_total", result="miss") == 4
    await service.stop()


async def test_a_known_text_is_answered_as_at_first(folder: Path) -> None:
    """Through HTTP: the same bytes but for the time it took, and the metrics tell the ratio."""
    service = await start(folder)
    async with client_of(service) as client:
        first, second = [await client.post(URL, json={"input": ["a", "b c"]}) for _ in "12"]
        metrics = (await client.get("/metrics")).text

    assert first.status_code == second.status_code == 200
    assert second.content == first.content
    assert second.headers["server-timing"].endswith("queue;dur=0.00, inference;dur=0.00")
    for result in ("hit", "miss"):
        labels = f'model="{NAME}",result="{result}",version="v1"'
        assert f"embedsvc_cache_texts_total{{{labels}}} 2.0" in metrics
    await service.stop()
