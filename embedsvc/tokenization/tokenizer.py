"""One model's tokenizer: prompts, truncation, checks of texts and ids.

Ids equal those of sentence-transformers, with one exception made on purpose: special-token strings
in a text are ordinary text. Knows nothing of requests but the index of a text in its input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedsvc.config import Truncation
from embedsvc.errors import InputTooLong, InvalidRequest, ModelError
from embedsvc.models.hub import read_object
from embedsvc.models.pretrained import open_tokenizer, read_by_transformers
from embedsvc.models.source import ModelFolder
from embedsvc.tokenization.cuts import CHARACTERS_PER_TOKEN, Cuts
from embedsvc.tokenization.plaintext import BARE, Frame, PlainText
from embedsvc.tokenization.tokens import Encoded, Tokens

# A text of more characters per allowed token is first cut: twice what one cut takes.
CUT_ABOVE = 2 * CHARACTERS_PER_TOKEN
# Without truncation the real number of tokens is told, up to this many characters.
COUNTED_CHARACTERS = 1_000_000
# Prompts come from the configuration; more than these are not remembered.
_MAX_PROMPTS = 1_000


@dataclass(slots=True, frozen=True)
class _Prompt:
    """A prompt as it is put before a text, and its length in tokens."""

    spelled: str
    length: int


_NO_PROMPT = _Prompt("", 0)


class Tokenizer:
    """The tokenizer of one model; every method may run on several threads at once.

    One tokenizer without truncation serves all three modes: cutting ids ourselves costs nothing,
    needs no clone per mode, and tells the real length.

    Attributes:
        max_length: longest text in tokens, special tokens included.
        vocab_size: ids are below it.
        prompts: the model's own, by name.
        default_prompt_name: used by requests that name none; empty for none.
    """

    def __init__(self, folder: ModelFolder, max_length: int) -> None:
        path = folder.transformer_path
        opened = open_tokenizer(path, lower_case=folder.lower_case)
        serialized = json.loads(opened.backend.to_str())
        self._plain = PlainText(serialized)
        with read_by_transformers("the tokenizer", path):
            frame = self._plain.frame()
        _check_length(max_length, len(frame.before) + len(frame.after), folder)
        self._fast = self._plain.tokenizer.encode_batch_fast
        self._cuts = Cuts(self._plain.tokenizer, serialized)
        self._special_ids = opened.special_ids
        self._frames = {True: frame, False: BARE}
        self._known_prompts: dict[tuple[str, bool], _Prompt] = {}
        self.max_length = max_length
        # Rows of the model's table may be fewer than the tokenizer's ids, or more.
        n_rows = read_object(path / "config.json").get("vocab_size") or self._plain.vocab_size
        self.vocab_size = min(self._plain.vocab_size, n_rows)
        self.prompts = folder.prompts
        self.default_prompt_name = folder.default_prompt_name

    def encode(
        self,
        texts: Sequence[str],
        *,
        truncate: Truncation,
        prompt: str = "",
        add_special_tokens: bool = True,
        first_index: int = 0,
    ) -> list[Encoded]:
        """Tokenize texts, in order; releases the GIL meanwhile.

        Truncation keeps the special tokens. END drops the end of the text, as in
        sentence-transformers. START drops its beginning but keeps the prompt before it: a query
        without its instruction would land elsewhere.

        Args:
            texts: each at most one row.
            truncate: end that a text over `max_length` loses; NONE refuses it.
            prompt: put before every text; special tokens in it stay special.
            add_special_tokens: whether the tokenizer adds its own around the text.
            first_index: index of the first text in the request, for errors.

        Raises:
            InvalidRequest: a text has no tokens or is not valid Unicode.
            InputTooLong: a text is over `max_length` and `truncate` is NONE.
        """
        frame = self._frames[add_special_tokens]
        lead = self._prompt(prompt, add_special_tokens) if prompt else _NO_PROMPT
        try:
            rows = [lead.spelled + text for text in texts] if prompt else texts
            if max(map(len, rows), default=0) > self._limit(truncate):
                return self._encode_mixed(rows, truncate, lead, add_special_tokens, first_index)
            encodings = self._fast(rows, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _not_text(texts, first_index) from error
        return [
            self._encoded(encoding.ids, truncate, lead, frame, index)
            for index, encoding in enumerate(encodings, first_index)
        ]

    def from_ids(self, ids: Sequence[int], *, truncate: Truncation, index: int) -> Encoded:
        """Take token ids as they are, with no special tokens added.

        Args:
            ids: ids of this model's vocabulary.
            truncate: end that a list over `max_length` loses; NONE refuses it.
            index: of the list in the request, for errors.

        Raises:
            InvalidRequest: the list is empty or has something that is no id of the vocabulary.
            InputTooLong: the list is over `max_length` and `truncate` is NONE.
        """
        if set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise self._not_an_id(ids, index)
        return self._encoded(list(ids), truncate, _NO_PROMPT, BARE, index)

    def tokens(self, text: str, *, prompt: str = "", add_special_tokens: bool = True) -> Tokens:
        """Return the tokens of a text, never truncated; releases the GIL meanwhile.

        Raises:
            InvalidRequest: the text is not valid Unicode.
        """
        try:
            [encoding] = self._plain.tokenizer.encode_batch(
                [self._plain.spell(prompt) + text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise _not_text([text], 0) from error
        return Tokens(encoding, self._plain, prompt, text)

    # --- steps of encode -------------------------------------------------------------------------

    def _prompt(self, prompt: str, add_special_tokens: bool) -> _Prompt:
        """Return a prompt with its length as sentence-transformers counts it."""
        key = (prompt, add_special_tokens)
        known = self._known_prompts.get(key)
        if known is None:
            spelled = self._plain.spell(prompt)
            [encoding] = self._fast([spelled], add_special_tokens=add_special_tokens)
            ids = self._shortened(encoding.ids, "END", 0, self._frames[add_special_tokens])
            ends_special = bool(ids) and ids[-1] in self._special_ids
            known = _Prompt(spelled, len(ids) - ends_special)
            if len(self._known_prompts) < _MAX_PROMPTS:
                self._known_prompts[key] = known
        return known

    def _encoded(
        self, ids: list[int], truncate: Truncation, lead: _Prompt, frame: Frame, index: int
    ) -> Encoded:
        """Check and truncate one text's ids."""
        n = len(ids)
        if 0 < n <= self.max_length:
            return Encoded(np.array(ids, np.int64), n, False, lead.length)
        if n == 0:
            raise InvalidRequest(
                f"input[{index}] has no tokens for this model; send a text that is not empty.",
                param="input",
            )
        if truncate == "NONE":
            raise self._too_long(index, str(n))
        kept = self._shortened(ids, truncate, lead.length, frame)
        return Encoded(np.array(kept, np.int64), n, True, lead.length)

    def _shortened(
        self, ids: list[int], truncate: Truncation, prompt_length: int, frame: Frame
    ) -> list[int]:
        """Return `max_length` ids at most: a beginning and an end.

             | beginning                    | end                    |
        END  | special tokens, prompt, text | special tokens         |
        START| special tokens, prompt       | text, special tokens   |
        """
        if len(ids) <= self.max_length:
            return ids
        n_head = self.max_length - len(frame.after)
        if truncate == "START":
            n_head = min(n_head, max(prompt_length, len(frame.before)))
        return ids[:n_head] + ids[len(ids) - (self.max_length - n_head) :]

    def _encode_mixed(
        self,
        rows: Sequence[str],
        truncate: Truncation,
        lead: _Prompt,
        add_special_tokens: bool,
        first_index: int,
    ) -> list[Encoded]:
        """Encode texts one by one, some of which are long enough to be cut first."""
        frame = self._frames[add_special_tokens]
        encoded = []
        for index, row in enumerate(rows, first_index):
            ids = self._ids_of_part(row, truncate, lead, frame)
            if ids is None:
                ids = self._fast([row], add_special_tokens=add_special_tokens)[0].ids
            elif truncate == "NONE":
                raise self._too_long(index, f"at least {len(ids)}")
            encoded.append(self._encoded(ids, truncate, lead, frame, index))
        return encoded

    def _ids_of_part(
        self, row: str, truncate: Truncation, lead: _Prompt, frame: Frame
    ) -> list[int] | None:
        """Return ids that truncate to the same as those of the whole text; None if it is needed."""
        if len(row) <= self._limit(truncate):
            return None
        n, skip = self.max_length + 1, len(lead.spelled)
        if truncate != "START":
            first = self._cuts.first_ids(row, n, skip)
            return None if first is None else [*frame.before, *first, *frame.after]
        first = self._cuts.first_ids(row, lead.length, skip) if lead.spelled else []
        last = self._cuts.last_ids(row, n, skip)
        if first is None or last is None:
            return None
        return [*frame.before, *first[: lead.length], *last, *frame.after]

    def _limit(self, truncate: Truncation) -> int:
        return COUNTED_CHARACTERS if truncate == "NONE" else CUT_ABOVE * self.max_length

    # --- errors ----------------------------------------------------------------------------------

    def _too_long(self, index: int, n_tokens: str) -> InputTooLong:
        return InputTooLong(
            f"This model's maximum context length is {self.max_length} tokens, however "
            f"input[{index}] has {n_tokens} tokens. Send a shorter text, split it, or let the "
            'server cut it with "truncate": "END".',
            param="input",
        )

    def _not_an_id(self, ids: Sequence[int], index: int) -> InvalidRequest:
        if not ids:
            return InvalidRequest(f"input[{index}] is an empty list of token ids.", param="input")
        position, wrong = next(
            (position, value)
            for position, value in enumerate(ids)
            if type(value) is not int or not 0 <= value < self.vocab_size
        )
        shown = wrong if type(wrong) is int else f"of type {type(wrong).__name__}"
        return InvalidRequest(
            f"input[{index}][{position}] is {shown}; token ids of this model are integers from 0 "
            f"to {self.vocab_size - 1}. Ids of another tokenizer (OpenAI's, for one) mean nothing "
            "to it: send the text instead.",
            param="input",
        )


def _check_length(max_length: int, n_special: int, folder: ModelFolder) -> None:
    if max_length <= n_special:
        raise ModelError(
            f"max_length is {max_length}, which the {n_special} special tokens of {folder.source} "
            "fill up"
        )
    if max_length > folder.position_limit:
        raise ModelError(
            f"max_length is {max_length}, but {folder.source} has positions for "
            f"{folder.position_limit} tokens only"
        )


def _not_text(texts: Sequence[str], first_index: int) -> InvalidRequest:
    """Name the text that tokenizers refused with a TypeError."""
    for index, text in enumerate(texts, first_index):
        if not isinstance(text, str):
            return InvalidRequest(f"input[{index}] is not a string.", param="input")
        try:
            text.encode()
        except UnicodeEncodeError:
            return InvalidRequest(
                f"input[{index}] has a lone surrogate (U+D800 to U+DFFF), which is not valid "
                "Unicode.",
                param="input",
            )
    return InvalidRequest("input cannot be tokenized.", param="input")
