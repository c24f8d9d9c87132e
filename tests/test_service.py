"""The service without HTTP: routing, limits, deadlines, vectors, on weightless models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from embedsvc.calls import EmbedCall
from embedsvc.config import (
    BatchingConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    ServerConfig,
    VersionConfig,
)
from embedsvc.engine.sequence import Priority
from embedsvc.errors import (
    ConfigError,
    DeadlineExceeded,
    InputTooLong,
    InvalidRequest,
    ModelError,
    ModelNotFound,
    NotReady,
    Overloaded,
    TooManyInputs,
    TooManyTokens,
)
from embedsvc.service import Service

NAME = "all-MiniLM-L6-v2"
MAX_TOKENS = 3000


def make_config(cache: Path, **version: object) -> Config:
    version = {"backend": "hash", "matryoshka_dims": [64, 128], **version}
    return Config(
        server=ServerConfig(cache_dir=str(cache), max_inputs=100, max_request_tokens=MAX_TOKENS),
        devices=[DeviceConfig(name="cpu", slots=2, threads_per_slot=1)],
        models=[
            ModelConfig(
                name=NAME,
                aliases=["text-embedding-3-small"],
                versions=[VersionConfig(**version)],  # type: ignore[arg-type]  # checked at load
            )
        ],
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache directory for the module, so that measurements are made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def service(cache: Path) -> AsyncIterator[Service]:
    """A started service; nothing may be left behind."""
    service = Service(make_config(cache))
    await service.start()
    yield service

    await service.stop()
    queue = service.info()["models"][0]["queue"]
    assert queue == {"sequences": 0, "tokens": 0, "seconds": 0.0}


async def test_vectors_have_unit_length_and_belong_to_their_texts(service: Service) -> None:
    """One vector a text, in order, whatever the lengths."""
    texts = [("word " * n).strip() for n in range(1, 60)]

    together = await service.embed(EmbedCall(NAME, texts))
    alone = [await service.embed(EmbedCall(NAME, [text])) for text in texts]

    np.testing.assert_array_equal(together.vectors, np.concatenate([a.vectors for a in alone]))
    np.testing.assert_allclose(np.linalg.norm(together.vectors, axis=1), 1, atol=1e-6)
    assert together.prompt_tokens == sum(a.prompt_tokens for a in alone)


async def test_an_alias_reaches_the_same_model(service: Service) -> None:
    """Clients that insist on OpenAI's names get the served model."""
    one = await service.embed(EmbedCall(NAME, ["hello"]))
    other = await service.embed(EmbedCall("text-embedding-3-small", ["hello"]))

    np.testing.assert_array_equal(one.vectors, other.vectors)


async def test_an_unknown_model_is_named_with_the_known_ones(service: Service) -> None:
    """The caller learns what is served."""
    with pytest.raises(ModelNotFound, match=f"'nope' does not exist. Served: {NAME}"):
        await service.embed(EmbedCall("nope", ["hello"]))


async def test_dimensions_cut_and_renormalise(service: Service) -> None:
    """Shorter vectors are the leading components at unit length."""
    full = (await service.embed(EmbedCall(NAME, ["hello"]))).vectors[0]

    short = (await service.embed(EmbedCall(NAME, ["hello"], dimensions=64))).vectors[0]

    np.testing.assert_allclose(short, full[:64] / np.linalg.norm(full[:64]), atol=1e-6)


@pytest.mark.parametrize("dimensions", [63, 385, 10**9])
async def test_dimensions_the_model_does_not_allow_are_refused(
    service: Service, dimensions: int
) -> None:
    """Never a different length with 200."""
    with pytest.raises(InvalidRequest, match="Allowed: 64, 128, 384"):
        await service.embed(EmbedCall(NAME, ["hello"], dimensions=dimensions))


async def test_too_many_inputs_are_refused(service: Service) -> None:
    """The message states the limit and the number sent."""
    with pytest.raises(TooManyInputs, match="101 items; 1 to 100"):
        await service.embed(EmbedCall(NAME, ["a"] * 101))


async def test_too_many_tokens_are_refused(service: Service) -> None:
    """The sum over a request has a limit of its own."""
    with pytest.raises(TooManyTokens, match=f"max {MAX_TOKENS}"):
        await service.embed(EmbedCall(NAME, ["word " * 200] * 40))


async def test_a_long_text_is_cut_and_reported(service: Service) -> None:
    """By default the end is lost and the answer counts such texts."""
    embedded = await service.embed(EmbedCall(NAME, ["word " * 5000, "short"]))

    assert embedded.n_truncated == 1
    assert embedded.prompt_tokens == 256 + 3


async def test_a_long_text_is_refused_where_cutting_is_off(service: Service) -> None:
    """truncate NONE answers with the limit and the number of tokens."""
    with pytest.raises(InputTooLong, match="256"):
        await service.embed(EmbedCall(NAME, ["word " * 5000], truncate="NONE"))


async def test_ids_of_the_vocabulary_equal_their_text(service: Service) -> None:
    """Token ids give the vector of the text they stand for."""
    (tokens,) = await service.tokenize(NAME, ["hello world"])
    ids = [token.id for token in tokens]

    by_ids = await service.embed(EmbedCall(NAME, [ids]))
    by_text = await service.embed(EmbedCall(NAME, ["hello world"]))

    np.testing.assert_array_equal(by_ids.vectors, by_text.vectors)


async def test_an_unknown_prompt_is_refused_and_the_known_are_listed(service: Service) -> None:
    """The caller learns which prompts exist, and which of its fields named another."""
    call = EmbedCall(NAME, ["hello"], prompt_name="poem", prompt_field="task")
    with pytest.raises(InvalidRequest, match=r"task: .* no prompt 'poem'. Known: .*query") as told:
        await service.embed(call)

    assert told.value.param == "task"


async def test_an_unknown_default_prompt_fails_the_start(cache: Path) -> None:
    """Else every request that names none would be refused for what it did not say."""
    service = Service(make_config(cache, default_prompt_name="poem"))
    with pytest.raises(ConfigError, match=r"^models\[0\]\.versions\[0\]\.default_prompt_name: "):
        await service.start()
    await service.stop()


async def test_buckets_over_the_models_maximum_fail_the_start(cache: Path) -> None:
    """The path of the field tells which model's they are."""
    service = Service(make_config(cache, batching=BatchingConfig(buckets=[64, 9000])))
    with pytest.raises(
        ConfigError, match=r"^models\[0\]\.versions\[0\]\.batching\.buckets: .*9000"
    ):
        await service.start()
    await service.stop()


async def test_a_prompt_counts_as_text(cache: Path) -> None:
    """A configured prompt changes vector and token count."""
    service = Service(make_config(cache, prompts={"query": "search for: "}))
    await service.start()

    prompted = await service.embed(EmbedCall(NAME, ["cats"], prompt_name="query"))
    spelled = await service.embed(EmbedCall(NAME, ["search for: cats"]))

    np.testing.assert_array_equal(prompted.vectors, spelled.vectors)
    assert prompted.prompt_tokens == spelled.prompt_tokens
    await service.stop()


async def test_a_full_queue_refuses(cache: Path) -> None:
    """What does not fit is refused before it is tokenized; the rest is answered."""
    batching = BatchingConfig(max_queue_sequences=8)
    service = Service(make_config(cache, batching=batching))
    await service.start()

    with pytest.raises(Overloaded):
        await service.embed(EmbedCall(NAME, ["a"] * 9))
    assert (await service.embed(EmbedCall(NAME, ["a"] * 6, priority=Priority.BULK))).prompt_tokens

    await service.stop()


async def test_refusals_are_logged_once_not_each(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An overloaded server writes one line for many refusals."""
    service = Service(make_config(cache, batching=BatchingConfig(max_queue_sequences=1)))
    await service.start()
    for _ in range(50):
        with pytest.raises(Overloaded):
            await service.embed(EmbedCall(NAME, ["a", "b"]))

    service._log_refusals(0.0)

    assert [r.getMessage() for r in caplog.records if "refused" in r.getMessage()] == [
        "requests refused n=50 queue_s=0.0"
    ]
    await service.stop()


async def test_what_an_idle_server_cannot_do_in_time_is_a_bad_request(cache: Path) -> None:
    """A client that sends more than its own deadline allows is told so at once."""
    service = Service(make_config(cache))
    await service.start()

    with pytest.raises(InvalidRequest, match="on this idle server"):
        service._check_time(EmbedCall(NAME, ["a"], timeout_s=1.0), own_s=5.0)

    await service.stop()


async def test_a_cancelled_call_leaves_nothing_behind(service: Service) -> None:
    """A client that goes away frees its place, at whatever moment."""
    calls = [
        asyncio.create_task(service.embed(EmbedCall(NAME, ["some text here"] * 50)))
        for _ in range(40)
    ]
    for turn, call in enumerate(calls):
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        call.cancel()

    await asyncio.gather(*calls, return_exceptions=True)

    assert service.info()["models"][0]["queue"]["sequences"] == 0


async def test_a_deadline_that_cannot_be_met_is_answered(service: Service) -> None:
    """A client that allows no time gets a 504, not a hang."""
    with pytest.raises(DeadlineExceeded):
        await service.embed(EmbedCall(NAME, ["hello"], timeout_s=0.0))


async def test_before_the_start_nothing_is_served(cache: Path) -> None:
    """A service that was never started refuses at once."""
    service = Service(make_config(cache))

    assert service.state == "loading"
    with pytest.raises(NotReady):
        await service.embed(EmbedCall(NAME, ["hello"]))
    await service.stop()


async def test_a_model_that_cannot_be_loaded_fails_the_start(cache: Path, tmp_path: Path) -> None:
    """The message names the field and the state turns to failed."""
    service = Service(make_config(cache, source=str(tmp_path / "nothing")))

    with pytest.raises(ModelError, match=r"models\[0\]"):
        await service.start()

    assert service.state == "failed"
    await service.stop()


async def test_a_text_beyond_any_model_is_refused_unread(service: Service) -> None:
    """What would be tokenized for seconds is refused with its index and the limit."""
    with pytest.raises(InvalidRequest, match=r"input\[1\] has 1000001 characters"):
        await service.embed(EmbedCall(NAME, ["a", "a" * 1_000_001]))


async def test_tokenizing_ends_at_the_deadline(service: Service) -> None:
    """A request whose texts take longer to tokenize than it has gets its 504 on time."""
    texts = ["a" * 1_000_000] * 20

    with pytest.raises(DeadlineExceeded, match="while the texts were tokenized"):
        await service.embed(EmbedCall(NAME, texts, timeout_s=0.06))
