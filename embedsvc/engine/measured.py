"""The measurements of a model on this machine, made once and kept in the cache.

Runs on the worker thread that loads the models.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import msgspec

from embedsvc.config import VersionConfig
from embedsvc.engine.calibrate import Calibration, calibrate
from embedsvc.engine.device import Device
from embedsvc.engine.devices import Devices
from embedsvc.models import Model
from embedsvc.models.cache import Cache
from embedsvc.models.host import processor, usable_cores
from embedsvc.models.source import ModelFolder

log = logging.getLogger(__name__)

CALIBRATION_LIMIT_S = 4.0


def measure(
    model: Model, folder: ModelFolder, settings: VersionConfig, devices: Devices, cache: Cache
) -> tuple[Device, Calibration]:
    """Return the device of a loaded model, divided into slots, and what batches cost on it."""
    key = measurement_key(folder, model)
    device = devices.get(model, settings, cache, key)
    return device, calibration(model, device, settings.batching.max_batch_size, cache, key)


def measurement_key(folder: ModelFolder, model: Model) -> dict[str, Any]:
    """Return what a measurement depends on: another machine or release measures again."""
    return {
        "weights": folder.weights_id,
        "device": model.device,
        "dtype": model.dtype,
        "processor": processor(),
        "cores": usable_cores(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def calibration(
    model: Model, device: Device, max_rows: int, cache: Cache, key: dict[str, Any]
) -> Calibration:
    """Return cost and token budget of a model on a device, measured where they are not known.

    Args:
        model: loaded.
        device: idle.
        max_rows: row limit of a batch.
        cache: where measurements are kept.
        key: of `measurement_key`.
    """
    key = {
        "kind": "calibration",
        "slots": device.slots,
        "threads": device.threads_per_slot,
        "max_length": model.max_length,
        "max_rows": max_rows,
        **key,
    }
    stored = cache.get(key)
    if stored is not None:
        return msgspec.convert(stored, Calibration)
    found = calibrate(model, device, max_rows, CALIBRATION_LIMIT_S)
    cache.put(key, msgspec.to_builtins(found))
    log.info("cost fitted %s", found)
    return found
