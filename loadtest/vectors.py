"""Vectors of many texts through HTTP, in the order of the texts."""

from __future__ import annotations

import asyncio
import base64
import sys

import numpy as np
import numpy.typing as npt
import uvloop

from embedsvc.bench.connection import Connection, embeddings_body, post, read_reply
from embedsvc.config import DEFAULT_NAME

Vectors = npt.NDArray[np.float32]

DIM = 384


def embed(
    address: tuple[str, int], texts: list[str], *, n_clients: int, texts_per_call: int
) -> Vectors:
    """Return `(n, 384) float32`, the default model's vectors of the texts."""
    return uvloop.run(_embed(address, texts, n_clients, texts_per_call))


async def _embed(
    address: tuple[str, int], texts: list[str], n_clients: int, texts_per_call: int
) -> Vectors:
    groups = [texts[i : i + texts_per_call] for i in range(0, len(texts), texts_per_call)]
    waiting = iter(enumerate(groups))
    parts: dict[int, Vectors] = {}

    async def client() -> None:
        connection = Connection(*address)
        for index, group in waiting:
            request = post(*address, "/v1/embeddings", embeddings_body(DEFAULT_NAME, group))
            answer = await connection.send(request)
            if answer.status != 200:
                sys.exit(f"status {answer.status}: {answer.body.decode()}")
            reply = read_reply(answer.body, len(group), DIM)
            raw = b"".join(base64.b64decode(str(item.embedding)) for item in reply.data)
            parts[index] = np.frombuffer(raw, dtype="<f4").reshape(len(group), DIM)
        connection.close()

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return np.concatenate([parts[index] for index in range(len(groups))])
