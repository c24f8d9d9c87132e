"""What clients may send to the embeddings route, and what the service gets of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from embedsvc.calls import EmbedCall
from embedsvc.engine.sequence import Priority
from tests.http_fakes import MODEL, URL, FakeService, client_of, error_of

pytest_plugins = ["tests.http_fixtures"]


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "", "b"], ["a", "", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_every_legal_form_of_input_keeps_its_texts_in_order(
    client: httpx.AsyncClient, service: FakeService, given: Any, inputs: Any
) -> None:
    """Strings, lists of strings, ids and lists of ids become one list of inputs."""
    response = await client.post(URL, json={"model": MODEL, "input": given})

    assert response.status_code == 200
    assert service.calls[0].inputs == inputs
    assert [d["index"] for d in response.json()["data"]] == list(range(len(inputs)))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (None, "$.input"),
        ([], "$.input"),
        ({}, "$.input"),
        (3, "$.input"),
        (True, "$.input"),
        (["a", None, 3], "$.input[1]"),
        (["a", 3, {"x": 1}], "$.input[1]"),
        ([1, 2, "a"], "$.input[2]"),
        ([1, True], "$.input[1]"),
        ([1.5], "$.input[0]"),
        ([[]], "$.input[0]"),
        ([[1], []], "$.input[1]"),
        ([["hello"]], "$.input[0]"),
        ([[1], ["a"]], "$.input[1]"),
        ([[1], "a"], "$.input[1]"),
    ],
)
async def test_bad_input_is_refused_naming_the_first_bad_index(
    client: httpx.AsyncClient, service: FakeService, given: Any, named: str
) -> None:
    """Nothing is dropped silently: mixed, empty and foreign lists are 400."""
    response = await client.post(URL, json={"model": MODEL, "input": given})

    error = error_of(response)
    assert response.status_code == 400
    assert f"'{named}'" in error["message"]
    assert error["param"] == "input"
    assert service.calls == []


@pytest.mark.parametrize("escape", [r"\ud83d", r"\udc4d", r"\udc4d\ud83d"])
async def test_halves_of_surrogate_pairs_are_replaced(
    client: httpx.AsyncClient, service: FakeService, escape: str
) -> None:
    """A text cut inside an emoji is embedded with U+FFFD; the whole emoji beside it stays."""
    body = rf'{{"model":"{MODEL}","input":["half {escape} x","\ud83d\udc4d"]}}'
    response = await client.post(URL, content=body)

    assert response.status_code == 200
    replaced = "\ufffd" * escape.count("u")
    assert service.calls[0].inputs == [f"half {replaced} x", "\U0001f44d"]


DEEP = 10_000
UNREADABLE = {
    "nothing": b"",
    "half": b"{",
    "null": b"null",
    "list": b"[1]",
    "string": b'"x"',
    "number": b"3",
    "latin 1": b'{"input":"\xff"}',
    "latin 1 and half a pair": b'{"input":"\\ud83d \xff"}',
    "half after half a pair": b'{"input":"\\ud83d"',
    "deep input": b'{"input":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep and unclosed": b'{"input":' + b"[" * DEEP,
    "deep after half a pair": b'{"input":"\\ud83d","z":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep unknown list": b'{"input":"a","z":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep unknown object": b'{"input":"a","z":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_bodies_that_are_no_json_object_are_refused(
    client: httpx.AsyncClient, body: bytes
) -> None:
    """Malformed, foreign and bottomless JSON is 400, never 500."""
    response = await client.post(URL, content=body)

    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_a_byte_order_mark_is_skipped(client: httpx.AsyncClient) -> None:
    """RFC 8259 lets a reader ignore it."""
    body = b"\xef\xbb\xbf" + json.dumps({"model": MODEL, "input": "a"}).encode()

    assert (await client.post(URL, content=body)).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_any_content_type_is_read_as_json(
    client: httpx.AsyncClient, content_type: str | None
) -> None:
    """curl sends a form type unless told otherwise."""
    headers = {} if content_type is None else {"content-type": content_type}
    body = json.dumps({"model": MODEL, "input": "a"}).encode()

    assert (await client.post(URL, content=body, headers=headers)).status_code == 200


# OPTIONS------


async def test_explicit_null_is_the_same_as_absent(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """LiteLLM and others send null for what they do not set."""
    fields = [
        "encoding_format", "dimensions", "user", "input_type", "task", "prompt_name", "truncate",
        "normalize", "priority", "add_special_tokens", "embed_dtype",
    ]  # fmt: skip
    body = {"model": MODEL, "input": "a", **dict.fromkeys(fields)}
    response = await client.post(URL, json=body)

    assert response.status_code == 200
    assert service.calls == [EmbedCall(model=MODEL, inputs=["a"])]
    assert isinstance(response.json()["data"][0]["embedding"], list)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dimensions": 64}, {"dimensions": 64}),
        ({"dimensions": 64.0}, {"dimensions": 64}),
        ({"input_type": "query"}, {"prompt_name": "query", "prompt_field": "input_type"}),
        ({"input_type": "search_query"}, {"prompt_name": "query", "prompt_field": "input_type"}),
        ({"task": "retrieval.query"}, {"prompt_name": "query", "prompt_field": "task"}),
        ({"task": "retrieval.passage"}, {"prompt_name": "document", "prompt_field": "task"}),
        ({"input_type": "passage"}, {"prompt_name": "document", "prompt_field": "input_type"}),
        (
            {"input_type": "search_document"},
            {"prompt_name": "document", "prompt_field": "input_type"},
        ),
        (
            {"input_type": "classification"},
            {"prompt_name": "classification", "prompt_field": "input_type"},
        ),
        ({"prompt_name": "passage", "task": "query"}, {"prompt_name": "passage"}),
        ({"truncate": "NONE"}, {"truncate": "NONE"}),
        ({"truncate": "start"}, {"truncate": "START"}),
        ({"truncate": True}, {"truncate": "END"}),
        ({"truncate": False}, {"truncate": "NONE"}),
        ({"normalize": False}, {"normalize": False}),
        ({"add_special_tokens": False}, {"add_special_tokens": False}),
        ({"priority": "bulk"}, {"priority": Priority.BULK}),
        ({"priority": "interactive"}, {"priority": Priority.INTERACTIVE}),
        ({"priority": 0}, {"priority": Priority.INTERACTIVE}),
        ({"priority": 1}, {"priority": Priority.BULK}),
        ({"embed_dtype": "float32"}, {}),
        ({"user": {"any": 1}, "zzz": [1]}, {}),
    ],
)
async def test_options_reach_the_service(
    client: httpx.AsyncClient,
    service: FakeService,
    fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    """Known fields are honoured in every dialect, unknown ones ignored."""
    response = await client.post(URL, json={"model": MODEL, "input": "a", **fields})

    assert response.status_code == 200
    assert service.calls == [EmbedCall(model=MODEL, inputs=["a"], **expected)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dimensions", 0),
        ("dimensions", -1),
        ("dimensions", True),
        ("dimensions", "64"),
        ("dimensions", 64.5),
        ("encoding_format", "md5"),
        ("encoding_format", ""),
        ("encoding_format", 1),
        ("truncate", "MIDDLE"),
        ("truncate", 1),
        ("normalize", "yes"),
        ("priority", "urgent"),
        ("priority", 1.5),
        ("add_special_tokens", 0),
        ("embed_dtype", "int8"),
        ("prompt_name", 1),
        ("model", 5),
    ],
)
async def test_bad_options_are_refused_by_name(
    client: httpx.AsyncClient, field: str, value: object
) -> None:
    """Every wrong value is 400 with the field as `param`."""
    response = await client.post(URL, json={"model": MODEL, "input": "a", field: value})

    error = error_of(response)
    assert response.status_code == 400
    assert error["param"] == field
    assert field in error["message"]


async def test_the_only_model_is_the_default(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """A request without a model is served where there is no choice."""
    response = await client.post(URL, json={"input": "a"})

    assert response.json()["model"] == MODEL
    assert service.calls[0].model == MODEL


@pytest.mark.parametrize("body", [{"input": "a"}, {"input": "a", "model": None}, {"model": ""}])
async def test_without_a_model_among_several_the_request_is_refused(body: dict[str, Any]) -> None:
    """OpenAI's own message tells what is missing."""
    async with client_of(FakeService("one", "two")) as client:
        response = await client.post(URL, json=body)

    assert response.status_code == 400
    assert error_of(response)["message"] == "you must provide a model parameter"


@pytest.mark.parametrize(
    ("headers", "timeout_s"),
    [
        ({}, None),
        ({"x-stainless-read-timeout": "30"}, 30.0),
        ({"x-request-timeout": "2.5"}, 2.5),
        ({"x-request-timeout": "600"}, 100.0),
        ({"x-request-timeout": "inf"}, 100.0),
        ({"x-stainless-read-timeout": "30", "x-request-timeout": "20"}, 20.0),
        ({"x-stainless-read-timeout": "20", "x-request-timeout": "30"}, 20.0),
        ({"x-stainless-read-timeout": "NOT_GIVEN", "x-request-timeout": "3"}, 3.0),
        ({"x-stainless-read-timeout": "None"}, None),
        ({"x-stainless-read-timeout": "0"}, None),
        ({"x-stainless-read-timeout": "nan"}, None),
        ({"x-stainless-read-timeout": ""}, None),
    ],
)
async def test_the_client_states_its_deadline(
    client: httpx.AsyncClient,
    service: FakeService,
    headers: dict[str, str],
    timeout_s: float | None,
) -> None:
    """The shortest counts, capped by the server's; what an SDK says of none is ignored."""
    await client.post(URL, json={"input": "a"}, headers=headers)

    assert service.calls[0].timeout_s == timeout_s


@pytest.mark.parametrize("value", ["abc", "30s", "0", "-5", "nan", "", "1,5", "\xb5"])
async def test_a_deadline_that_is_no_time_is_refused_by_name(
    client: httpx.AsyncClient, service: FakeService, value: str
) -> None:
    """Who wrote it relies on it, and would learn too late that nothing came of it."""
    headers = {b"x-request-timeout": value.encode("latin-1")}
    response = await client.post(URL, json={"input": "a"}, headers=headers)

    assert response.status_code == 400
    assert "x-request-timeout" in error_of(response)["message"]
    assert f"got '{value}'" in error_of(response)["message"]
    assert service.calls == []
