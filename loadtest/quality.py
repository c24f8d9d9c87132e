"""SciFact retrieval through HTTP: `make quality` prints nDCG@10 of the served model."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

from embedsvc.bench.serving import served
from loadtest.vectors import Vectors, embed
from loadtest.workload import DATA, read_lines

EXPECTED, TOLERANCE = 64.51, 0.3
TOP = 10


def ndcg(scores: Vectors, relevant: list[dict[int, int]]) -> float:
    """Return the mean nDCG@10 of `(queries, documents)` scores.

    Args:
        scores: similarity of every query with every document.
        relevant: for every query, the gain of its relevant documents by column.

    Source: Järvelin and Kekäläinen, 2002, with gain as judged and discount log2(rank + 1).
    """
    discounts = 1 / np.log2(np.arange(2, TOP + 2))
    ranked = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]
    values = []
    for columns, gains in zip(ranked, relevant, strict=True):
        found = np.array([gains.get(int(column), 0) for column in columns])
        best = np.sort(list(gains.values()))[::-1][:TOP]
        values.append((found @ discounts[: len(found)]) / (best @ discounts[: len(best)]))
    return float(np.mean(values))


def judgements(folder: Path, queries: list[str], documents: list[str]) -> list[dict[int, int]]:
    """Return, for every query, the gain of its relevant documents by their position."""
    row = {name: index for index, name in enumerate(queries)}
    column = {name: index for index, name in enumerate(documents)}
    relevant: list[dict[int, int]] = [{} for _ in queries]
    with (folder / "qrels.test.tsv").open(newline="") as lines:
        for query, document, gain in list(csv.reader(lines, delimiter="\t"))[1:]:
            if int(gain) > 0:
                relevant[row[query]][column[document]] = int(gain)
    return relevant


def main() -> None:
    """Serve the default model, embed SciFact through HTTP, print nDCG@10."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, default=DATA / "scifact")
    args = parser.parse_args()
    documents = read_lines(args.data / "corpus.jsonl.gz")
    queries = read_lines(args.data / "queries.test.jsonl")
    texts = [f"{d['title']} {d['text']}" for d in documents] + [q["text"] for q in queries]
    with served() as server:
        vectors = embed(server.address, texts, n_clients=4, texts_per_call=32)
    scores = vectors[len(documents) :] @ vectors[: len(documents)].T
    relevant = judgements(args.data, [q["_id"] for q in queries], [d["_id"] for d in documents])
    score = 100 * ndcg(scores, relevant)
    print(f"SciFact nDCG@10 {score:.2f} (published {EXPECTED} ± {TOLERANCE})")
    sys.exit(abs(score - EXPECTED) > TOLERANCE)


if __name__ == "__main__":
    main()
