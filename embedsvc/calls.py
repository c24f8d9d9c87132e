"""What the service is asked and what it answers, independent of HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from embedsvc.config import Truncation
from embedsvc.engine.sequence import NO_KEY, Key, Priority
from embedsvc.models.buffers import Vectors


@dataclass(slots=True)
class EmbedCall:
    """What a client asks for.

    Attributes:
        model: name or alias.
        inputs: texts, or token ids of the model's own vocabulary.
        truncate: end that long texts lose; None takes the model's setting.
        prompt_name: prompt put before every text; None takes the model's default.
        prompt_field: what the client calls it, for errors.
        normalize: whether vectors get unit length.
        dimensions: leading components to keep; None keeps all.
        priority: share class; None decides by the number of inputs.
        timeout_s: seconds the client waits; None takes the server's default.
        add_special_tokens: whether the tokenizer adds its special tokens.
        key: whom it counts for.
    """

    model: str
    inputs: list[str] | list[list[int]]
    truncate: Truncation | None = None
    prompt_name: str | None = None
    prompt_field: str = "prompt_name"
    normalize: bool = True
    dimensions: int | None = None
    priority: Priority | None = None
    timeout_s: float | None = None
    add_special_tokens: bool = True
    key: Key = NO_KEY


@dataclass(slots=True)
class Embedded:
    """The answer to an `EmbedCall`.

    Attributes:
        vectors: `(n, dim) float32`, C-contiguous; row i belongs to input i.
        prompt_tokens: tokens embedded, special tokens included, padding excluded.
        n_truncated: texts that lost an end.
        version: version that computed them.
        tokenize_s: seconds spent tokenizing.
        queue_s: seconds until the first row went to the device.
        inference_s: seconds from there to the last row.
    """

    vectors: Vectors
    prompt_tokens: int
    n_truncated: int
    version: str
    tokenize_s: float
    queue_s: float
    inference_s: float


@dataclass(slots=True, frozen=True)
class CatalogEntry:
    """A name clients may use as `model`."""

    id: str
    created: int
    root: str
