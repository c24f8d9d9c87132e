"""Load client: `python -m loadtest.client --url http://127.0.0.1:8000 --clients 64`.

One event loop with raw connections, since it shares the machine with the server. Who decides when a
call leaves (`closed_loop`) is apart from sending, checking and counting it (`Load.call`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import numpy as np
import uvloop

from embedsvc.bench.connection import Connection, ReplyError, embeddings_body, post, read_reply
from embedsvc.metrics import length_class
from loadtest import workload

# A refused client that comes back at once would measure nothing but refusals.
REFUSED_PAUSE_S = 0.1


@dataclass(slots=True)
class Call:
    """One request, built beforehand."""

    request: bytes
    n_texts: int


@dataclass(slots=True)
class Outcome:
    """What came of the calls that finished inside the measured window.

    Attributes:
        seconds: length of the window.
        texts: texts answered.
        tokens: `usage.prompt_tokens` of the answers.
        latencies: seconds from the first byte out to the last byte in, by length class of the text.
        errors: failed calls by status, `connection` or `reply`.
    """

    seconds: float = 0.0
    texts: int = 0
    tokens: int = 0
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def texts_per_s(self) -> float:
        """Texts answered per second."""
        return self.texts / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens answered per second."""
        return self.tokens / self.seconds

    def summary(self) -> dict[str, object]:
        """Return rates, errors and latency percentiles (in milliseconds) as plain JSON types."""
        everything = [value for values in self.latencies.values() for value in values]
        return {
            "seconds": round(self.seconds, 2),
            "texts_per_s": round(self.texts_per_s, 1),
            "tokens_per_s": round(self.tokens_per_s),
            "errors": dict(self.errors),
            "latency_ms": {
                name: percentiles_ms(values)
                for name, values in [("all", everything), *sorted(self.latencies.items())]
            },
        }


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    """Return count and percentiles of latencies, in milliseconds."""
    if not seconds:
        return {"n": 0}
    p50, p90, p99, top = np.percentile(seconds, [50, 90, 99, 100]) * 1e3
    named = {"p50": p50, "p90": p90, "p99": p99, "max": top}
    return {"n": len(seconds), **{name: round(float(value), 1) for name, value in named.items()}}


class Load:
    """Sends calls, checks every reply, counts what finishes inside the window.

    The window opens when `n_warmup` calls have finished and closes `n_measured` calls later, so
    that it holds the workload once, however fast the server is. Calls repeat in order until then.
    """

    def __init__(self, calls: list[Call], dim: int, n_warmup: int, n_measured: int) -> None:
        self.outcome = Outcome()
        self._calls: Iterator[Call] = itertools.cycle(calls)
        self._dim = dim
        self._n_finished = 0
        self._opens, self._closes = n_warmup, n_warmup + n_measured
        self._opened = time.perf_counter()

    @property
    def over(self) -> bool:
        """Whether the window has closed."""
        return self._n_finished >= self._closes

    async def call(self, connection: Connection) -> None:
        """Send the next call and count what comes of it."""
        call = next(self._calls)
        sent = time.perf_counter()
        error, tokens = "", 0
        try:
            answer = await connection.send(call.request)
            if answer.status == 200:
                tokens = read_reply(answer.body, call.n_texts, self._dim).usage.prompt_tokens
            else:
                error = str(answer.status)
        except OSError:
            error = "connection"
        except ReplyError:
            error = "reply"
        self._count(call, sent, tokens, error)
        if error:
            await asyncio.sleep(REFUSED_PAUSE_S)

    def _count(self, call: Call, sent: float, tokens: int, error: str) -> None:
        now = time.perf_counter()
        self._n_finished += 1
        if self._n_finished == self._opens:
            self._opened = now
        if not self._opens < self._n_finished <= self._closes:
            return
        self.outcome.seconds = now - self._opened
        if error:
            self.outcome.errors[error] += 1
            return
        self.outcome.texts += call.n_texts
        self.outcome.tokens += tokens
        self.outcome.latencies[length_class(tokens // call.n_texts)].append(now - sent)


async def closed_loop(load: Load, host: str, port: int, n_clients: int) -> Outcome:
    """Run clients that send their next call as soon as the last is answered."""

    async def client() -> None:
        connection = Connection(host, port)
        while not load.over:
            await load.call(connection)
        connection.close()

    await asyncio.gather(*(client() for _ in range(n_clients)))
    return load.outcome


def calls_for(
    host: str, port: int, model: str, texts: list[str], texts_per_call: int = 1
) -> list[Call]:
    """Return one call for every `texts_per_call` texts."""
    groups = [texts[i : i + texts_per_call] for i in range(0, len(texts), texts_per_call)]
    return [
        Call(post(host, port, "/v1/embeddings", embeddings_body(model, group)), len(group))
        for group in groups
    ]


def run_closed(
    address: tuple[str, int],
    model: str,
    texts: list[str],
    *,
    dim: int,
    n_clients: int,
    texts_per_call: int = 1,
    n_warmup: int = 500,
    n_measured: int | None = None,
) -> Outcome:
    """Measure a closed loop from a thread without an event loop."""
    calls = calls_for(*address, model, texts, texts_per_call)
    load = Load(calls, dim, n_warmup, len(calls) if n_measured is None else n_measured)
    return uvloop.run(closed_loop(load, *address, n_clients))


def main() -> None:
    """Measure a running server with the mixed workload."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="all-MiniLM-L6-v2")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--texts", type=int, default=workload.N_TEXTS)
    parser.add_argument("--texts-per-call", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=500, help="calls before the window opens")
    args = parser.parse_args()
    url = urlsplit(args.url)
    outcome = run_closed(
        (url.hostname or "127.0.0.1", url.port or 80),
        args.model,
        workload.mixed(args.texts),
        dim=args.dim,
        n_clients=args.clients,
        texts_per_call=args.texts_per_call,
        n_warmup=args.warmup,
    )
    print(json.dumps(outcome.summary(), indent=2))


if __name__ == "__main__":
    main()
