"""The vectors beside sentence-transformers': `python -m loadtest.parity`.

2,000 texts of every kind through HTTP in float32 and in the default precision, each text once alone
on the device and once beside 31 other clients' texts, against `SentenceTransformer.encode` in
float32.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict

import numpy as np
from sentence_transformers import SentenceTransformer

from embedsvc.bench.serving import served
from embedsvc.config import DEFAULT_SOURCE
from embedsvc.models.source import resolve
from loadtest.vectors import Vectors, embed
from loadtest.workload import SEED, TEXTS, read_lines

MAX_DIFFERENCE = 1e-5
MIN_COSINE = 0.9999


def texts_of_every_kind(n_texts: int) -> list[str]:
    """Return as many texts of each kind as there are of the rarest share, shuffled."""
    by_kind: dict[str, list[str]] = defaultdict(list)
    for row in read_lines(TEXTS):
        by_kind[row["kind"]].append(row["text"])
    rng = random.Random(SEED)
    share = n_texts // len(by_kind)
    texts = [text for kind in by_kind.values() for text in rng.sample(kind, min(share, len(kind)))]
    rng.shuffle(texts)
    return texts


def reference(texts: list[str]) -> Vectors:
    """Return sentence-transformers' unit vectors in float32."""
    model = SentenceTransformer(str(resolve(DEFAULT_SOURCE).path), device="cpu")
    vectors: Vectors = model.encode(texts, normalize_embeddings=True, batch_size=8)
    return vectors


def main() -> None:
    """Print the largest difference and the lowest cosine for each precision and load."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--texts", type=int, default=2_000)
    args = parser.parse_args()
    texts = texts_of_every_kind(args.texts)
    expected = reference(texts)
    right = True
    for dtype in ("float32", "auto"):
        with served("--dtype", dtype, "--log-level", "warning") as server:
            for name, n_clients in (("alone", 1), ("mixed", 32)):
                vectors = embed(server.address, texts, n_clients=n_clients, texts_per_call=1)
                difference = float(np.abs(vectors - expected).max())
                cosine = float((vectors * expected).sum(axis=1).min())
                print(f"{dtype} {name}: difference {difference:.2e}, cosine {cosine:.6f}")
                right &= cosine >= MIN_COSINE
                right &= difference <= MAX_DIFFERENCE or dtype != "float32"
    print(f"{len(texts)} texts; bars: float32 {MAX_DIFFERENCE:g}, cosine {MIN_COSINE}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
