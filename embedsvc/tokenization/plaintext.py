"""A tokenizer that takes special-token strings in a text for what they are there: text.

Works on the serialized form of a `tokenizers.Tokenizer`. Knows nothing of models or requests.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

import tokenizers

from embedsvc.errors import ModelError


@dataclass(slots=True, frozen=True)
class Frame:
    """Special tokens that the tokenizer puts around a text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


BARE = Frame((), ())


class PlainText:
    """A tokenizer for which special-token strings in a text are ordinary text.

    Every special token is renamed to a random alias that no text contains, in the added tokens and
    in the model's vocabulary: tokenizers' own switch `encode_special_tokens` covers only the first,
    and a Unigram model still finds `</s>` in the second. A prompt from the configuration keeps its
    special tokens by being spelled with the aliases.

    Attributes:
        tokenizer: encodes `spell(prompt) + text`.
        special: names of the special tokens by id.
        vocab_size: ids are below it.
    """

    def __init__(self, serialized: dict[str, Any]) -> None:
        """Build it from a serialized tokenizer, which is changed in place."""
        specials = [token for token in serialized["added_tokens"] if token["special"]]
        self.special: dict[int, str] = {token["id"]: token["content"] for token in specials}
        self._aliases = {name: secrets.token_hex(16) for name in self.special.values()}
        self._found = _matcher(specials)
        for token in specials:
            token["content"] = self._aliases[token["content"]]
        _rename(serialized["model"], self._aliases)
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(serialized))
        ids = _ids(serialized)
        self.vocab_size = 1 + max(ids.values(), default=0)
        for name, number in ids.items():
            if self.tokenizer.token_to_id(name) != number:
                raise ModelError(
                    f"the tokenizer's special tokens cannot be kept out of texts: the "
                    f"id of {name!r} changes"
                )

    def frame(self) -> Frame:
        """Find the special tokens that the tokenizer puts around a text.

        The text has characters that few vocabularies know: a tokenizer that fails on them is to be
        refused at the start, not at the first such text.

        Raises:
            ModelError: they are not at its ends.
            Exception: tokenizers knows no narrower class for an unknown character.
        """
        encoding = self.tokenizer.encode("a 1 e . \U00010330\ue000\U000f0000 end")
        ids, mask = encoding.ids, encoding.special_tokens_mask
        n_before = mask.index(0) if 0 in mask else 0
        n_after = mask[::-1].index(0) if 0 in mask else 0
        if 0 not in mask or sum(mask) != n_before + n_after:
            raise ModelError("it finds no tokens in a text, or puts special ones inside")
        return Frame(tuple(ids[:n_before]), tuple(ids[len(ids) - n_after :]))

    def spell(self, prompt: str) -> str:
        """Spell the special tokens of a prompt so that the tokenizer sees them."""
        return self._found.sub(lambda match: self._aliases[match[0]], prompt)

    def origins(self, prompt: str) -> list[int]:
        """Return where each character of `spell(prompt)` comes from, and one more for its end."""
        origins: list[int] = []
        done = 0
        for match in self._found.finditer(prompt):
            origins += range(done, match.start())
            origins += [match.start()] * len(self._aliases[match[0]])
            done = match.end()
        return [*origins, *range(done, len(prompt) + 1)]


def _matcher(specials: list[dict[str, Any]]) -> re.Pattern[str]:
    """Return a pattern that finds special tokens as tokenizers does: leftmost, then longest."""
    if not specials:
        return re.compile(r"(?!)")
    patterns = {token["content"]: re.escape(token["content"]) for token in specials}
    for token in specials:
        if token["single_word"]:
            patterns[token["content"]] = rf"(?<!\w){patterns[token['content']]}(?!\w)"
    return re.compile("|".join(patterns[name] for name in sorted(patterns, key=len, reverse=True)))


def _ids(serialized: dict[str, Any]) -> dict[str, int]:
    """Return the ids of all tokens of a serialized tokenizer."""
    vocab = serialized["model"]["vocab"]
    pieces = {p: i for i, (p, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab
    return {**pieces, **{token["content"]: token["id"] for token in serialized["added_tokens"]}}


def _rename(model: dict[str, Any], aliases: dict[str, str]) -> None:
    """Rename pieces of a serialized model in place; their ids stay."""
    vocab = model["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {aliases.get(piece, piece): number for piece, number in vocab.items()}
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if model.get("merges"):
        # Two pieces of ordinary text must not merge into a special token either.
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            pair
            for pair in pairs
            if not {*pair, pair[0] + pair[1].removeprefix(prefix)} & aliases.keys()
        ]
