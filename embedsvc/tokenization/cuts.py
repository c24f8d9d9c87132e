"""Tokens of an end of a long text, from a part of the text.

Works on the serialized form of a `tokenizers.Tokenizer`. Knows nothing of models or requests.
"""

from __future__ import annotations

import re
from typing import Any

import tokenizers

# Real text has 2 to 6 characters a token; a part that proves too short is taken again, larger.
CHARACTERS_PER_TOKEN = 6
_GROWTH = 4
# How far the next place for a cut is looked for.
_WINDOW = 4_096
# White space at which a text may be cut, if the tokenizer allows it.
_WHITE = " \n\r\t"
# How byte-level vocabularies spell bytes. Source: GPT-2's table: printable Latin-1 stands for
# itself, the other bytes for U+0100 onwards, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_SPELLED_BYTES = {
    0x100 + place: byte for place, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
# Pre-tokenizers whose pieces depend on their own characters and the next, not on a count from the
# start of the text.
_LOCAL_PRE_TOKENIZERS = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "Metaspace",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
# Text on which every place for a cut is tried once.
_PROBE = (
    "The quick brown-fox, aged 12345 years, can't jump over 3.14 lazy dogs.\n\nIt's  two   spaces;"
    "\ta tab\ta\ttab\r\nna\u00efve caf\u00e9 e\u0301t\u00e9 \u00dcber \u0130stanbul\n \u6f22\u5b57 "
    "\u304b\u306a \u043c\u0438\u0440 \u0915\u094d\u0937 \ud55c\uae00 word2vec x\u00b2 don't\nI'll "
    "we're CamelCase snake_case http://a.b/c?d=e&f <tag> \U0001f44d\U0001f3fd ok a b c 1 2 3 "
    # Letters that few vocabularies know: runs of unknown characters may become one token.
    "\U00010330 \U00010330\n\U00010330\t\U00010330\r\U00010330 end"
)


class Cuts:
    """Places where a text can be cut in two without changing the tokens of either part.

    A place is white space after a letter or digit, for a tokenizer none of whose tokens spans that
    and whose pieces are found locally: then the model meets the same pieces on each side, with or
    without the other. Both are checked here, the second on a probe of many scripts; a tokenizer
    that fails gets no places, and its texts are never cut. (Between other characters nothing is
    sure: a cut through a word, a run of white space or a combining sequence changes tokens.)
    """

    def __init__(self, plain: tokenizers.Tokenizer, serialized: dict[str, Any]) -> None:
        self._plain = plain
        local = _is_local(serialized)
        safe = "".join(w for w in _WHITE if local and not _spans(serialized, w))
        self._before: re.Pattern[str] | None = None
        for white in (safe, " ") if " " in safe else ():
            self._before = re.compile(rf"[^\W_](?=[{white}])")
            if self._hold_on_the_probe():
                return
        self._before = None

    def first_ids(self, text: str, n: int, skip: int = 0) -> list[int] | None:
        """Return the first n or more ids of a long text from a part of it.

        Args:
            text: any text.
            n: ids wanted, without special tokens that the tokenizer adds.
            skip: characters at the beginning that are kept whole (a prompt).

        Returns:
            Ids equal to those the whole text begins with; None if the whole text is needed.
        """
        size = skip + n * CHARACTERS_PER_TOKEN
        while size < len(text) // 2:
            place = self._place(text, size, size + _WINDOW)
            if place is not None and len(ids := self._head(text, place)) >= n:
                return ids
            size *= _GROWTH
        return None

    def last_ids(self, text: str, n: int, skip: int = 0) -> list[int] | None:
        """Return the last n or more ids of a long text from a part of it, as `first_ids` does."""
        size = n * CHARACTERS_PER_TOKEN
        while size < (len(text) - skip) // 2:
            place = self._place(text, len(text) - size, len(text) - size + _WINDOW)
            if place is not None and len(ids := self._tail(text, place)) >= n:
                return ids
            size *= _GROWTH
        return None

    def _place(self, text: str, start: int, stop: int) -> int | None:
        """Return the index of the first such white space in `text[start + 1:stop]`."""
        match = self._before.search(text, start, stop) if self._before else None
        return match.end() if match else None

    def _head(self, text: str, place: int) -> list[int]:
        """Return the ids of `text[:place]`, the first ids of the whole text."""
        return self._encode(text[:place]).ids

    def _tail(self, text: str, place: int) -> list[int]:
        """Return the ids of `text[place:]`, the last ids of the whole text."""
        # The letter before the place goes with it, since a text that begins with white space is
        # another thing to many tokenizers; tokens of that letter are left out again.
        encoding = self._encode(text[place - 1 :])
        return [i for i, (start, _) in zip(encoding.ids, encoding.offsets, strict=True) if start]

    def _encode(self, text: str) -> tokenizers.Encoding:
        return self._plain.encode_batch([text], add_special_tokens=False)[0]

    def _hold_on_the_probe(self) -> bool:
        whole = self._encode(_PROBE).ids
        place = self._place(_PROBE, 0, len(_PROBE))
        while place is not None:
            if self._head(_PROBE, place) + self._tail(_PROBE, place) != whole:
                return False
            place = self._place(_PROBE, place, len(_PROBE))
        return True


def _is_local(serialized: dict[str, Any]) -> bool:
    """Whether pieces of a text are found without counting from its start."""
    kinds = set(_kinds(serialized["pre_tokenizer"]))
    words_needed = serialized["model"].get("type") in ("WordPiece", "WordLevel")
    # An added token that takes the white space behind it hides it from what follows.
    greedy = any(token["rstrip"] and not token["special"] for token in serialized["added_tokens"])
    return kinds <= _LOCAL_PRE_TOKENIZERS and bool(kinds or not words_needed) and not greedy


def _kinds(step: dict[str, Any] | None) -> list[str]:
    """Return the types of a serialized step and those inside it."""
    if step is None:
        return []
    inner = step.get("pretokenizers") or step.get("normalizers") or []
    return [step["type"], *(kind for one in inner for kind in _kinds(one))]


def _spans(serialized: dict[str, Any], white: str) -> bool:
    """Whether any token has this white space after a letter, a digit, or part of a character."""
    vocab = serialized["model"]["vocab"]
    pieces = "\0".join(piece for piece, _ in vocab) if isinstance(vocab, list) else "\0".join(vocab)
    if "ByteLevel" in {*_kinds(serialized["pre_tokenizer"]), *_kinds(serialized["normalizer"])}:
        bytes_of_pieces = pieces.translate(_SPELLED_BYTES).encode("latin-1", "replace")
        pieces = bytes_of_pieces.decode("utf-8", "replace")
    else:
        pieces = pieces.replace("\u2581", " ")
    added = "\0".join(t["content"] for t in serialized["added_tokens"] if not t["special"])
    return re.search(rf"(?:[^\W_]|\ufffd){white}", f"{pieces}\0{added}") is not None
