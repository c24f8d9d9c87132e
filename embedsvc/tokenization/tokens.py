"""What tokenization gives: the ids of a text, or its tokens one by one."""

from __future__ import annotations

from dataclasses import dataclass

from embedsvc.models.buffers import Ids


@dataclass(slots=True, eq=False)
class Encoded:
    """One tokenized text.

    Attributes:
        ids: `(length,) int64`, special tokens included, at most `max_length`, never empty.
        n_tokens: tokens before truncation; a lower bound where the text was cut beforehand.
        truncated: whether it lost an end.
        prompt_length: leading tokens that pooling may leave out: those of the prompt and the
            special tokens before it, as sentence-transformers counts them.
    """

    ids: Ids
    n_tokens: int
    truncated: bool
    prompt_length: int


@dataclass(slots=True, frozen=True)
class Token:
    """One token of `POST /tokenize`.

    Attributes:
        id: in the vocabulary.
        text: the characters it stands for; its name if it is special or stands for none.
        special: whether it is a special token.
        start: its first character in prompt and text put together; None if the tokenizer added it.
        stop: the character after its last.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None
