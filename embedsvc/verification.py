"""What `embedsvc check` does beyond the file: load every model, look at its vectors and its cost.

Golden vectors lie beside the other cached measurements, so that an upgrade of a library that moves
vectors is noticed before an index is filled with two kinds. Runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from embedsvc.config import Config, VersionConfig
from embedsvc.engine.calibrate import Calibration
from embedsvc.engine.devices import Devices
from embedsvc.engine.measured import measure
from embedsvc.loading import load
from embedsvc.models.cache import Cache
from embedsvc.models.verify import GoldenResult, check_golden


def verify(config: Config) -> Iterator[tuple[bool, str]]:
    """Load each model in turn; yield lines about it, each with whether all is as it should be.

    Raises:
        StartError: a model cannot be loaded.
    """
    cache, devices = Cache(config.server.cache_dir), Devices(config)
    try:
        for index, model in enumerate(config.models):
            yield from _verify(model.name, model.versions[0], f"models[{index}]", cache, devices)
    finally:
        devices.close()


def _verify(
    name: str, version: VersionConfig, where: str, cache: Cache, devices: Devices
) -> Iterator[tuple[bool, str]]:
    folder, _, model = load(version, where, cache)
    try:
        what = f"{name}: {model.dim} dimensions, {model.device}, {model.dtype}"
        if version.backend == "hash":
            yield True, f"{what}; the hash backend has no vectors to verify"
            return
        result = check_golden(model, folder, cache)
        yield result.status != "moved", f"{what}; {_in_words(result)}"
        device, found = measure(model, folder, version, devices, cache)
        yield True, f"{name}: {in_units(found, device.slots, device.threads_per_slot)}"
    finally:
        model.close()


def _in_words(result: GoldenResult) -> str:
    match result.status:
        case "stored":
            return "golden vectors stored, later checks compare with them"
        case "same":
            return f"vectors as stored by {_versions(result.then)} (cosine {result.cosine:.6f})"
        case "moved":
            return (
                f"vectors MOVED since {_versions(result.then)} (lowest cosine {result.cosine:.6f}, "
                f"now {_versions(result.now)}): those in your index may no longer match"
            )
        case "unavailable":
            return "golden vectors could not be stored: server.cache_dir cannot be written"


def in_units(found: Calibration, slots: int, threads_per_slot: int) -> str:
    """Return a calibration in units that can be read."""
    cost, errors = found.cost, found.held_out_error
    floor = f", at least {cost.floor * 1e3:.3g} ms" if cost.floor > 0 else ""
    cold = f", {cost.cold * 1e3:.3g} ms more after a rest" if cost.cold > 0 else ""
    judged = (
        ""
        if errors is None
        else (f"; error {errors.median:.1%} (median), {errors.p90:.1%} (p90) on shapes not fitted")
    )
    return (
        f"{cost.c0 * 1e3:.3g} ms a batch, {cost.c1 * 1e6:.3g} µs a row, {cost.c2 * 1e6:.3g} µs a "
        f"token, {cost.c3 * 1e9:.3g} ns a token squared{floor}{cold}{judged}; "
        f"max_batch_tokens {found.max_batch_tokens}, slots {slots}, "
        f"threads per slot {threads_per_slot}"
    )


def _versions(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())
