"""The devices of one service, opened when the first model needs them.

Decides how a device is divided into slots; runs on the worker thread that loads the models.
"""

from __future__ import annotations

from typing import Any

from embedsvc.config import Config, DeviceConfig, VersionConfig
from embedsvc.engine.calibrate import batch_rate, best_division
from embedsvc.engine.device import Device
from embedsvc.engine.slots import OwnSlots, SharedSlots, Slots
from embedsvc.models import Model, isolated
from embedsvc.models.cache import Cache
from embedsvc.models.host import usable_cores
from embedsvc.models.owner import Owner
from embedsvc.models.wire import Share

DIVISION_LIMIT_S = 2.0
GPU_SLOTS = 2


class Devices:
    """The devices of one service, opened when the first model needs them.

    Args:
        config: says how they are divided.

    Attributes:
        owner: of the slots, where several workers share the devices.
    """

    def __init__(self, config: Config, owner: Owner | None = None) -> None:
        self.owner = owner
        self._configs = {device.name: device for device in config.devices}
        self._open: dict[str, Device] = {}

    def get(
        self, model: Model, version: VersionConfig, cache: Cache, key: dict[str, Any]
    ) -> Device:
        """Return the device of a loaded model, measuring its division into slots where `auto`."""
        name = model.device
        if name not in self._open:
            config = self._configs.get(name, DeviceConfig(name=name))
            slots, threads = _division(config, model, version.backend, cache, key)
            self._open[name] = Device(name, self._slots(name, slots, version), threads)
        return self._open[name]

    def _slots(self, name: str, n_slots: int, version: VersionConfig) -> Slots:
        """Return who grants the slots of a device; none need be for vectors that cost nothing."""
        weightless = version.backend == "hash" and not isolated(version)
        if self.owner is None or weightless:
            return OwnSlots(n_slots)
        return SharedSlots(n_slots, self.owner.ask(Share(name, n_slots)))

    def close(self) -> None:
        """Stop all device threads."""
        for device in self._open.values():
            device.close()


def _division(
    config: DeviceConfig, model: Model, backend: str, cache: Cache, key: dict[str, Any]
) -> tuple[int, int]:
    cores = usable_cores()
    if config.slots != "auto" or config.threads_per_slot != "auto":
        slots = cores if config.slots == "auto" else config.slots
        if config.threads_per_slot == "auto":
            return slots, max(1, cores // slots)
        if config.slots == "auto":
            slots = max(1, cores // config.threads_per_slot)
        return slots, config.threads_per_slot
    if model.device != "cpu":
        return GPU_SLOTS, 1
    if backend == "hash":
        return cores, 1
    stored = cache.get({"kind": "division", **key})
    if stored is None:

        def measure(slots: int, threads: int, seconds: float) -> float:
            device = Device(model.device, slots, threads)
            try:
                return batch_rate(model, device, seconds)
            finally:
                device.close()

        slots, threads = best_division(cores, measure, DIVISION_LIMIT_S)
        cache.put({"kind": "division", **key}, {"slots": slots, "threads": threads})
        return slots, threads
    return int(stored["slots"]), int(stored["threads"])
