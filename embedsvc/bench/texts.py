"""Texts to measure with: rows `{"text": …}` of a JSONL file, or built-in ones."""

from __future__ import annotations

import random
import re
from pathlib import Path

import msgspec
from msgspec import Struct

from embedsvc.errors import ConfigError

# Each is about one token in the vocabularies of the common models.
_WORDS = re.findall(
    r"\w+",
    """the a of to in for on with is are was not this that from by how why when where what which
    order card payment account train city weather music water river house school doctor market
    system memory network server file function test model data table value error result change
    cell protein study patient treatment group risk effect rate level time year day hour place""",
)


class _Row(Struct):
    text: str


def read_texts(path: Path) -> list[str]:
    """Return the texts of a JSONL file.

    Raises:
        ConfigError: unreadable, empty, or not rows of `{"text": …}`.
    """
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--texts: {path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f'--texts: {path} must have rows of {{"text": …}}: {error}') from None
    if not rows:
        raise ConfigError(f"--texts: {path} has no rows")
    return [row.text for row in rows]


def builtin_texts(n_texts: int, seed: int = 0) -> list[str]:
    """Return made-up texts, two thirds short questions, one third passages of 30 to 250 words."""
    rng = random.Random(seed)
    return [words(rng, _length(rng)) for _ in range(n_texts)]


def words(rng: random.Random, n_words: int) -> str:
    """Return `n_words` random words."""
    return " ".join(rng.choices(_WORDS, k=n_words))


def _length(rng: random.Random) -> int:
    return rng.randint(4, 20) if rng.random() < 0.65 else rng.randint(30, 250)
