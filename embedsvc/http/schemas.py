"""Request bodies: the structs, and their translation into calls of the service.

Knows nothing of ASGI. Runs on the event loop. Limits and names that depend on a model (inputs,
tokens, dimensions, prompts, vocabulary) are checked by the service, not here.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from embedsvc.calls import EmbedCall
from embedsvc.config import Truncation
from embedsvc.engine.sequence import NO_KEY, Key, Priority
from embedsvc.errors import InvalidRequest

EncodingFormat = Literal["float", "base64"]

# Names of the two sides of a search in the dialects of Cohere, NIM, Voyage and Jina; anything else
# is taken as the name of a prompt.
PROMPT_OF_TASK = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}
TRUNCATIONS: dict[str | bool, Truncation] = {
    "END": "END",
    "START": "START",
    "NONE": "NONE",
    True: "END",
    False: "NONE",
}
_ACCEPTED_INPUT = "a string, a list of strings, a list of token ids or a list of such lists"


class EmbeddingsRequest(Struct):
    """Body of `POST /v1/embeddings`; `null` is the same as absent, unknown fields are ignored."""

    input: Any = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | float | None = None
    input_type: str | None = None
    task: str | None = None
    prompt_name: str | None = None
    truncate: str | bool | None = None
    normalize: bool | None = None
    priority: str | int | None = None
    add_special_tokens: bool | None = None
    embed_dtype: str | None = None


class LargeEmbeddingsRequest(EmbeddingsRequest):
    """The same, decoded in steps."""

    input: str | list[object] | None = None


class TokenizeRequest(Struct):
    """Body of `POST /tokenize`; `inputs` is another spelling of `input`."""

    input: Any = None
    inputs: Any = None
    model: str | None = None
    prompt_name: str | None = None
    add_special_tokens: bool | None = None


class LargeTokenizeRequest(TokenizeRequest):
    """The same, decoded in steps."""

    input: str | list[object] | None = None
    inputs: str | list[object] | None = None


def embed_call(
    request: EmbeddingsRequest,
    *,
    default_model: str | None,
    timeout_s: float | None,
    key: Key = NO_KEY,
) -> EmbedCall:
    """Translate a body into a call of the service.

    Args:
        request: the decoded body.
        default_model: the model of requests that name none; None refuses them.
        timeout_s: what the client said it waits.
        key: whom it counts for.

    Raises:
        InvalidRequest: a field has a value that no model accepts.
    """
    if request.embed_dtype not in (None, "float32", "float"):
        raise InvalidRequest("embed_dtype must be float32 for now.", param="embed_dtype")
    prompt_field, prompt_name = _prompt(request)
    return EmbedCall(
        model=model_name(request.model, default_model),
        inputs=_inputs(request.input),
        truncate=_truncation(request.truncate),
        prompt_name=prompt_name,
        prompt_field=prompt_field,
        normalize=request.normalize is not False,
        dimensions=_dimensions(request.dimensions),
        priority=_priority(request.priority),
        timeout_s=timeout_s,
        add_special_tokens=request.add_special_tokens is not False,
        key=key,
    )


def encoding_format(request: EmbeddingsRequest) -> EncodingFormat:
    """Return how the vectors are written: `float` unless base64 is asked for.

    Raises:
        InvalidRequest: any other value.
    """
    match request.encoding_format:
        case None | "float":
            return "float"
        case "base64":
            return "base64"
        case other:
            message = f"Invalid value for 'encoding_format' = {other[:40]}."
            raise InvalidRequest(
                f"{message} Supported values: ['float','base64'].", param="encoding_format"
            )


def model_name(model: str | None, default_model: str | None) -> str:
    """Return the requested model, or the default where none (or an empty one) is named.

    Raises:
        InvalidRequest: none is named and there is no default.
    """
    if model:
        return model
    if default_model is None:
        raise InvalidRequest("you must provide a model parameter")
    return default_model


def texts(request: TokenizeRequest) -> list[str]:
    """Return the texts of a tokenize request.

    Raises:
        InvalidRequest: neither a string nor a list of strings.
    """
    field = texts_field(request)
    value = getattr(request, field)
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list) or any(type(text) is not str for text in inputs):
        raise InvalidRequest(f"'{field}' must be a string or a list of strings.", param=field)
    return inputs


def texts_field(request: TokenizeRequest) -> str:
    """Return under which of its two names a tokenize request gives its texts."""
    return "inputs" if request.input is None and request.inputs is not None else "input"


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """Normalise `input`; the order is kept and nothing is dropped.

    The empty string is a legal text, alone and in a list: its vector is that of the model's special
    tokens. A flat list of ids is one input.
    """
    if type(value) is str:
        return [value]
    if value is None:
        raise InvalidRequest(f"'$.input' is missing: give {_ACCEPTED_INPUT}.", param="input")
    if type(value) is not list or not value:
        raise InvalidRequest(
            f"'$.input' is invalid: it must be {_ACCEPTED_INPUT}, and not empty.", param="input"
        )
    kinds = set(map(type, value))
    if kinds == {str}:
        return value
    if kinds == {int}:
        return [value]
    if kinds == {list} and all(_is_ids(ids) for ids in value):
        return value
    raise _bad_element(value)


def _is_ids(value: Any) -> bool:
    return type(value) is list and set(map(type, value)) == {int}


def _bad_element(value: list[Any]) -> InvalidRequest:
    """Name the first element that cannot stand where it stands."""
    kind = type(value[0])

    def fits(element: Any) -> bool:
        if type(element) is not kind:
            return False
        return _is_ids(element) if kind is list else kind in (str, int)

    index = next(index for index, element in enumerate(value) if not fits(element))
    return InvalidRequest(
        f"'$.input[{index}]' is invalid: 'input' must be {_ACCEPTED_INPUT}, all of one kind; "
        "a list of ids cannot be empty.",
        param="input",
    )


def _truncation(value: str | bool | None) -> Truncation | None:
    if value is None:
        return None
    try:
        return TRUNCATIONS[value.upper() if isinstance(value, str) else value]
    except KeyError:
        raise InvalidRequest(
            "truncate must be 'END', 'START', 'NONE', true (END) or false (NONE).", param="truncate"
        ) from None


def _prompt(request: EmbeddingsRequest) -> tuple[str, str | None]:
    """Return the field that names the prompt, and the name."""
    if request.prompt_name is None:
        for field, task in (("input_type", request.input_type), ("task", request.task)):
            if task is not None:
                return field, PROMPT_OF_TASK.get(task, task)
    return "prompt_name", request.prompt_name


def _dimensions(value: int | float | None) -> int | None:
    if value is None:
        return None
    if value < 1 or value != value // 1:
        raise InvalidRequest("dimensions must be a whole number, at least 1.", param="dimensions")
    return int(value)


def _priority(value: str | int | None) -> Priority | None:
    """Numbers follow vLLM and Cohere: 0 or less is served before 1 and more."""
    match value:
        case None:
            return None
        case int():
            return Priority.INTERACTIVE if value <= 0 else Priority.BULK
        case "interactive":
            return Priority.INTERACTIVE
        case "bulk":
            return Priority.BULK
    raise InvalidRequest(
        "priority must be 'interactive', 'bulk', or a number (0 first).", param="priority"
    )
