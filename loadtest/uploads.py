"""Large uploads: `python -m loadtest.uploads` sends bodies of 64 MiB while others ask for health.

The longest wait of the others is about as long as a body holds the event loop. Bodies are of the
kinds that cost a server most to read; some are legal, some are not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import time
from collections.abc import Iterator

from embedsvc.bench.serving import served
from loadtest.target import arguments

MIB = 1 << 20
N_TEXTS = 2048
TIMEOUT_S = 300.0


def main() -> None:
    """Print the answer to each body, its time, and how long others waited meanwhile."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--mib", type=int, default=60, help="size of a body")
    args, flags = arguments(parser)
    with served(*flags) as server:
        print(f"{'body':14}{'status':>7}{'seconds':>9}{'others p50 ms':>15}{'max ms':>8}")
        for name, body in bodies(args.mib * MIB):
            with Others(server.address) as others:
                began = time.perf_counter()
                status = post(server.address, body)
                seconds = time.perf_counter() - began
            print(
                f"{name:14}{status:7}{seconds:9.2f}{others.ms(0.5):15.1f}{others.ms(1.0):8.1f}",
                flush=True,
            )


def bodies(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield bodies of about so many bytes, by name."""
    each = size // N_TEXTS
    yield "nothing", b"{}"
    for name, piece in (
        ("ASCII", "some words "),
        ("Chinese", "漢字かな"),
        ("escapes", 'a "line"\n'),
        ("emoji", "\N{THUMBS UP SIGN}"),
    ):
        text = piece * (each // len(json.dumps(piece, ensure_ascii=False).encode()))
        yield name, json.dumps({"input": [text] * N_TEXTS}, ensure_ascii=False).encode()
    half = json.dumps({"input": ["\ud83d words" * (each // 12)] * N_TEXTS})
    yield "halves", half.encode()
    yield "one text", json.dumps({"input": "word " * (size // 5)}).encode()
    yield "short texts", b'{"input":["a"' + b',"a"' * (size // 4) + b"]}"
    yield "ids", b'{"input":[1' + b",12345" * (size // 6) + b"]}"
    yield "lists of ids", b'{"input":[[1]' + b",[12345]" * (size // 8) + b"]}"
    yield "hidden ids", b'{"input":["a",[1' + b",12345" * (size // 6) + b"]]}"
    yield "an object", b'{"input":{"a":[1' + b",12345" * (size // 6) + b"]}}"
    yield "unknown field", b'{"input":"a","zzz":[1' + b",12345" * (size // 6) + b"]}"
    yield "broken", b'{"input":["' + b"\\\\" * (size // 2)


def post(address: tuple[str, int], body: bytes) -> int:
    """Send a body and return the status of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


class Others:
    """A client that asks for health, again and again, while the context lasts."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._connection = http.client.HTTPConnection(*address, timeout=TIMEOUT_S)
        self._waits: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def ms(self, quantile: float) -> float:
        """Return a quantile of the waits in milliseconds."""
        waits = sorted(self._waits)
        return 1000 * waits[min(len(waits) - 1, int(quantile * len(waits)))]

    def _ask(self) -> None:
        while not self._ended.is_set():
            began = time.perf_counter()
            self._connection.request("GET", "/health/live")
            self._connection.getresponse().read()
            self._waits.append(time.perf_counter() - began)
            self._ended.wait(0.001)


if __name__ == "__main__":
    main()
