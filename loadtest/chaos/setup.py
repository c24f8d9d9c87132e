"""A server to break, and the texts it is sent with the vectors they must come back as."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from embedsvc.bench.serving import running
from embedsvc.config import DEFAULT_NAME
from loadtest.census import MARK
from loadtest.chaos.client import Run
from loadtest.chaos.faults import Target
from loadtest.chaos.server import MODULE
from loadtest.chaos.texts import Pool, hashed, random_texts
from loadtest.target import raise_open_files
from loadtest.vectors import embed

N_TEXTS = 2_000
# A real model first says what each text's vector is, one at a time.
N_SERVED_TEXTS = 300
DEADLINE_S = 20.0

CONFIG = f"""
[server]
workers = {{workers}}
timeout_s = {DEADLINE_S}
max_body_bytes = 671{{turn}}0000

[[models]]
name = "{DEFAULT_NAME}"

[[models.versions]]
isolate = true
"""
# Of the weightless model only: no measurement of it may be kept, and batches are to be many.
CONFIG_OF_HASH = """
[models.versions.batching]
max_batch_tokens = 4096
"""


@contextmanager
def prepared(
    backend: str, flags: list[str], *, workers: int, seed: int, log: Path | None
) -> Iterator[Target]:
    """Run a server that is ready to be broken.

    Args:
        backend: as for `embedsvc serve`; the vectors of `hash` are computed here, those of others
            are what the server says while it is idle.
        flags: of `embedsvc serve`.
        workers: processes that serve HTTP.
        seed: of the texts.
        log: where the server's log goes; None drops it.
    """
    raise_open_files()
    exact = backend == "hash"
    texts = random_texts(N_TEXTS if exact else N_SERVED_TEXTS, random.Random(seed))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = stack.enter_context((log or folder / "log").open("w"))
        text, file = _config(folder, workers, exact=exact), folder / "chaos.toml"
        file.write_text(text.replace("{turn}", "0"))
        command = [sys.executable, "-m", MODULE, "serve", str(file)]
        command += ["--port", "0", "--backend", backend, *flags]
        with ThreadPoolExecutor() as threads:
            hashing = threads.submit(hashed, texts if exact else [])
            server = stack.enter_context(running(command, {MARK: str(folder)}, lines))
        vectors = hashing.result()
        if not exact:
            vectors = embed(server.address, texts, n_clients=1, texts_per_call=1)
        run = Run(server.address, server.model, Pool(texts, vectors, exact), DEADLINE_S)
        yield Target(server.pid, file, text, run, random.Random(seed))


def _config(folder: Path, workers: int, *, exact: bool) -> str:
    """Return the server's file; `{turn}` in it changes each time it is written."""
    text = CONFIG.replace("{workers}", str(workers))
    if exact:
        return text.replace("[server]", f'[server]\ncache_dir = "{folder}"') + CONFIG_OF_HASH
    return text
