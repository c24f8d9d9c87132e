"""What tokenization gives: the ids of a text, or its tokens one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import tokenizers

from embedsvc.models.buffers import Ids
from embedsvc.tokenization.plaintext import PlainText


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


class Tokens(Sequence[Token]):
    """The tokens of one text, each made when it is looked at.

    A token takes microseconds with the GIL held, and a text may have 300,000: whoever looks at them
    does so in slices.
    """

    def __init__(
        self, encoding: tokenizers.Encoding, plain: PlainText, prompt: str, text: str
    ) -> None:
        """Hold what `plain` found in a prompt and a text."""
        self._encoding = encoding
        self._plain = plain
        self._whole = prompt + text
        self._ids: list[int] = encoding.ids
        self._added: list[int] = encoding.special_tokens_mask
        # Where characters of the spelled prompt come from; what follows it is only shifted.
        self._origins = plain.origins(prompt)
        self._shift = len(prompt) - (len(self._origins) - 1)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        """Make one token, or a list of some."""
        places = range(len(self._ids))[index]
        return self._token(places) if isinstance(places, int) else [*map(self._token, places)]

    def _token(self, place: int) -> Token:
        number = self._ids[place]
        name = self._plain.special.get(number)
        start, stop = (self._origin(x) for x in self._encoding.token_to_chars(place) or (0, 0))
        shown = name or self._whole[start:stop] or self._plain.tokenizer.id_to_token(number) or ""
        if self._added[place]:
            return Token(number, shown, True, None, None)
        return Token(number, shown, name is not None, start, stop)

    def _origin(self, character: int) -> int:
        known = character < len(self._origins)
        return self._origins[character] if known else character + self._shift
