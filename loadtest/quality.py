"""SciFact retrieval through HTTP: `make quality` prints nDCG@10 of the served model."""

from __future__ import annotations

import argparse
import asyncio
import base64
import csv
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import uvloop

from embedsvc.bench.connection import Connection, embeddings_body, post, read_reply
from embedsvc.bench.serving import served
from loadtest.workload import DATA, read_lines

Vectors = npt.NDArray[np.float32]

EXPECTED, TOLERANCE = 64.51, 0.3
TOP = 10
TEXTS_PER_CALL = 32
N_CONNECTIONS = 4


async def embed(address: tuple[str, int], model: str, texts: list[str], dim: int) -> Vectors:
    """Return `(n, dim) float32`, the vectors of the texts over a few connections."""
    groups = [texts[i : i + TEXTS_PER_CALL] for i in range(0, len(texts), TEXTS_PER_CALL)]
    waiting = iter(enumerate(groups))
    parts: dict[int, Vectors] = {}

    async def client() -> None:
        connection = Connection(*address)
        for index, group in waiting:
            request = post(*address, "/v1/embeddings", embeddings_body(model, group))
            answer = await connection.send(request)
            if answer.status != 200:
                sys.exit(f"status {answer.status}: {answer.body.decode()}")
            reply = read_reply(answer.body, len(group), dim)
            raw = b"".join(base64.b64decode(str(item.embedding)) for item in reply.data)
            parts[index] = np.frombuffer(raw, dtype="<f4").reshape(len(group), dim)
        connection.close()

    await asyncio.gather(*(client() for _ in range(N_CONNECTIONS)))
    return np.concatenate([parts[index] for index in range(len(groups))])


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
        vectors = uvloop.run(embed(server.address, "all-MiniLM-L6-v2", texts, dim=384))
    scores = vectors[len(documents) :] @ vectors[: len(documents)].T
    relevant = judgements(args.data, [q["_id"] for q in queries], [d["_id"] for d in documents])
    score = 100 * ndcg(scores, relevant)
    print(f"SciFact nDCG@10 {score:.2f} (published {EXPECTED} ± {TOLERANCE})")
    sys.exit(abs(score - EXPECTED) > TOLERANCE)


if __name__ == "__main__":
    main()
