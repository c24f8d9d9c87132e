"""`bench offline` beside a plain loop: `python -m loadtest.plain`.

The loop calls the same model on length-sorted batches, one thread a slot, and does nothing else: no
engine, no pool, no metrics. What `bench offline` loses against it is the price of our machinery.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
from pathlib import Path
from time import perf_counter

from embedsvc.bench.offline import Rows, sorted_batches
from embedsvc.config import Config
from embedsvc.configfile import Overrides, load
from embedsvc.deployment import deploy
from embedsvc.engine.devices import Devices
from embedsvc.metrics import Metrics
from embedsvc.models.buffers import Ids
from embedsvc.models.threads import set_batch_threads
from embedsvc.models.torch import TorchModel
from loadtest import workload
from loadtest.ratio import offline_rate

BAR = 0.95


def main() -> None:
    """Print both rates of every round and the ratio of their medians."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    texts = workload.mixed(workload.N_TEXTS)
    config = load(None, Overrides())
    rates: dict[str, list[float]] = {"plain": [], "offline": []}
    for turn in range(1, args.rounds + 1):
        rates["plain"].append(plain_rate(config, texts))
        rates["offline"].append(float(offline_rate(texts, [])["tokens_per_s"]))
        print({name: round(values[-1]) for name, values in rates.items()}, turn, flush=True)
    plain, offline = (statistics.median(values) for values in rates.values())
    print(
        f"offline {offline:.0f} tokens/s, plain loop {plain:.0f} tokens/s, "
        f"ratio {offline / plain:.3f} (bar {BAR})"
    )
    sys.exit(offline / plain < BAR)


def plain_rate(config: Config, texts: list[str]) -> float:
    """Return tokens per second of the loop."""
    devices = Devices(config)
    deployment = deploy(config.models[0], "models[0]", config, devices, Metrics())
    devices.close()
    limits = deployment.engine.policy.limits
    model = TorchModel(deployment.folder, cache_dir=Path(config.server.cache_dir).expanduser())
    model.load()
    ids = [e.ids for e in deployment.tokenizer.encode(texts, truncate="END")]
    batches = sorted_batches([len(one) for one in ids], limits)
    slots = deployment.engine.device.slots
    threads = [
        threading.Thread(target=_loop, args=(model, ids, batches[k::slots], limits.rows(8)))
        for k in range(slots)
    ]
    began = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(map(len, ids)) / (perf_counter() - began)


def _loop(model: TorchModel, ids: list[Ids], batches: list[Rows], max_rows: int) -> None:
    set_batch_threads(1)
    buffer = model.allocate(1 << 16, max_rows)
    for rows, width in batches:
        buffer.fill([ids[row] for row in rows], [0] * len(rows), width)
        model.forward(buffer, len(rows), width)


if __name__ == "__main__":
    main()
