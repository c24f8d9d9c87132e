"""The texts that measurements send: the mixed workload, or built-in texts where its data is absent.

The data lives beside the repository, in ../shared/data; see the README there for its sources.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from embedsvc.bench.texts import builtin_texts

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TEXTS = DATA / "texts" / "mixed.jsonl.gz"
SHORT = {"support_question", "assistant_utterance"}
LONG = {"doc_section", "source_function", "paper_abstract", "cli_page"}
SHORT_SHARE = 0.65
LONG_WORD_PIECES = range(33, 257)
N_TEXTS = 4_000
SEED = 20_240


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, gzipped or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return msgspec.json.Decoder(dict[str, Any]).decode_lines(data)


def mixed(n_texts: int = N_TEXTS, seed: int = SEED) -> list[str]:
    """Return the mixed workload: 65 % short questions, 35 % passages, shuffled."""
    if not TEXTS.exists():
        return _builtin(n_texts, seed)
    short, long = questions_and_passages()
    rng = random.Random(seed)
    n_short = round(n_texts * SHORT_SHARE)
    texts = _draw(rng, short, n_short) + _draw(rng, long, n_texts - n_short)
    rng.shuffle(texts)
    return texts


def questions_and_passages() -> tuple[list[str], list[str]]:
    """Return the short questions and the passages that the mixed workload is drawn from."""
    if not TEXTS.exists():
        texts = sorted(_builtin(N_TEXTS, SEED), key=len)
        n_short = round(N_TEXTS * SHORT_SHARE)
        return texts[:n_short], texts[n_short:]
    rows = read_lines(TEXTS)
    short = [row["text"] for row in rows if row["kind"] in SHORT]
    long = [row["text"] for row in rows if row["kind"] in LONG and row["wp"] in LONG_WORD_PIECES]
    return short, long


def _builtin(n_texts: int, seed: int) -> list[str]:
    print(f"{TEXTS} is absent: built-in texts instead", file=sys.stderr)
    return builtin_texts(n_texts, seed)


def _draw(rng: random.Random, texts: list[str], n: int) -> list[str]:
    """Draw without repeats as long as there are enough."""
    return rng.sample(texts, n) if n <= len(texts) else rng.choices(texts, k=n)


def write(texts: list[str], path: Path) -> None:
    """Write texts as rows of `{"text": …}`."""
    path.write_bytes(msgspec.json.Encoder().encode_lines([{"text": text} for text in texts]))


def main() -> None:
    """Write the mixed workload to a file, for `embedsvc bench offline --texts FILE`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--texts", type=int, default=N_TEXTS)
    args = parser.parse_args()
    write(mixed(args.texts), args.path)


if __name__ == "__main__":
    main()
