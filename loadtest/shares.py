"""Keys by weight: `python -m loadtest.shares` has two keys send as much as they can.

Their weights are 3 and 1, the second has three times as many clients. Counted are the tokens that
went through the model for each.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import tempfile
from collections import Counter
from pathlib import Path

import uvloop

from embedsvc.bench.connection import Connection
from embedsvc.bench.open_loop import Call, calls_for
from embedsvc.bench.outcome import OK, ending_of
from embedsvc.bench.scrape import scrape
from embedsvc.bench.serving import served
from loadtest import workload
from loadtest.target import DIM, Bars, arguments

WEIGHTS = {"heavy": 3.0, "light": 1.0}
N_CLIENTS = {"heavy": 8, "light": 24}
TEXTS_PER_CALL = 16
# In which the queue fills before anything is counted.
LEAD_S = 5.0
PAUSE_S = 0.1
TOKENS = "embedsvc_key_tokens_total"
SHARE, TOLERANCE = 0.75, 0.05


def main() -> None:
    """Print the share of the key with three times the weight, and its bars."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    args, flags = arguments(parser)
    with tempfile.TemporaryDirectory() as folder:
        config = configured(Path(folder))
        with served(str(config), "--log-level", "error", *flags) as server:
            calls = {
                name: calls_for(
                    *server.address,
                    server.model,
                    workload.mixed(),
                    TEXTS_PER_CALL,
                    {"authorization": f"Bearer {name}"},
                )
                for name in WEIGHTS
            }
            tokens, endings = uvloop.run(contest(server.address, calls, args.seconds))
    judge(tokens, endings)


def configured(folder: Path) -> Path:
    """Write the keys, which are called as themselves, and a configuration that names their file."""
    entries = [
        f'[[keys]]\nname = "{name}"\nweight = {weight}\n'
        f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name, weight in WEIGHTS.items()
    ]
    keys, config = folder / "keys.toml", folder / "config.toml"
    keys.write_text("".join(entries))
    config.write_text(f'[server]\nkeys_file = "{keys}"\n')
    return config


async def contest(
    address: tuple[str, int], calls: dict[str, list[Call]], seconds: float
) -> tuple[dict[str, float], Counter[str]]:
    """Send for some seconds; return the tokens by key meanwhile, and how calls ended."""
    endings = Counter[str]()

    async def client(name: str, first: int) -> None:
        connection = Connection(*address)
        for call in itertools.islice(itertools.cycle(calls[name]), first, None):
            answer = await connection.send(call.request)
            ending, _ = ending_of(answer, call.n_texts, DIM)
            endings[ending] += 1
            if ending != OK:
                await asyncio.sleep(PAUSE_S)

    clients = [
        asyncio.create_task(client(name, 5 * k)) for name, n in N_CLIENTS.items() for k in range(n)
    ]
    await asyncio.sleep(LEAD_S)
    before = await scrape(address)
    await asyncio.sleep(seconds)
    after = await scrape(address)
    for task in clients:
        task.cancel()
    tokens = {
        name: after.total(TOKENS, key=name) - before.total(TOKENS, key=name) for name in WEIGHTS
    }
    return tokens, endings


def judge(tokens: dict[str, float], endings: Counter[str]) -> None:
    """Print every bar and end the process."""
    print(f"tokens by key: {tokens}, calls: {dict(endings)}\n")
    bars = Bars()
    bars.empty("calls without vectors", sorted(endings.keys() - {OK}))
    share = tokens["heavy"] / max(1.0, sum(tokens.values()))
    bars.at_least("share of the key of weight 3 beside weight 1", share, SHARE - TOLERANCE)
    bars.at_most("share of the key of weight 3 beside weight 1", share, SHARE + TOLERANCE)
    bars.exit()


if __name__ == "__main__":
    main()
