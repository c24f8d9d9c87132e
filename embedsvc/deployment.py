"""A deployment: one version of one model with everything it needs to be served.

Built on a worker thread at start; read on the event loop afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from embedsvc.config import Config, ModelConfig, VersionConfig
from embedsvc.engine.admission import Admission
from embedsvc.engine.buckets import Limits, first_edges
from embedsvc.engine.calibrate import Calibration
from embedsvc.engine.device import Device
from embedsvc.engine.devices import Devices
from embedsvc.engine.engine import Engine
from embedsvc.engine.measured import measure
from embedsvc.engine.policy import Policy
from embedsvc.engine.sequence import Request, Sequence
from embedsvc.engine.warm_up import warm_up
from embedsvc.errors import InvalidRequest, ModelDied, ModelError
from embedsvc.loading import EVERY_MODELS_PROMPTS, load
from embedsvc.metrics import Metrics, VersionMetrics
from embedsvc.models import Model
from embedsvc.models.buffers import BufferPool
from embedsvc.models.cache import Cache
from embedsvc.models.source import ModelFolder
from embedsvc.models.verify import check_golden
from embedsvc.tokenization import Tokenizer
from embedsvc.tuning.histogram import LengthHistogram
from embedsvc.tuning.refit import Refit
from embedsvc.vector_cache import VectorCache

log = logging.getLogger(__name__)

# How often a model is begun with whose process is killed before it is ready to serve.
TRIES = 3


@dataclass(slots=True, frozen=True)
class Deployment:
    """One served version."""

    config: ModelConfig
    settings: VersionConfig
    folder: ModelFolder
    tokenizer: Tokenizer
    engine: Engine
    calibration: Calibration
    cache: VectorCache
    metrics: VersionMetrics
    lengths: LengthHistogram
    refit: Refit | None
    created: int

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts by name: the model's own and those of the configuration, which win."""
        return self.folder.prompts | self.settings.prompts

    def prompt(self, name: str | None, field: str = "prompt_name") -> str:
        """Return the text of a prompt.

        Args:
            name: of the prompt; None takes the default.
            field: what names it, for the error.

        Raises:
            InvalidRequest: the model has no prompt of this name.
        """
        if name is None:
            name = self.settings.default_prompt_name or self.folder.default_prompt_name
            if not name:
                return ""
        prompts = self.prompts
        if name == "document" and name not in prompts:
            name = "passage"
        if name in prompts:
            return prompts[name]
        if name in EVERY_MODELS_PROMPTS:
            return ""
        known = ", ".join(sorted({*prompts, "query", "document"}))
        raise InvalidRequest(
            f"{field}: the model has no prompt '{name[:100]}'. Known: {known}.", param=field
        )

    def dimensions(self, asked: int | None) -> int:
        """Return the components of the vectors a request gets.

        Raises:
            InvalidRequest: the model was not trained for vectors of this size.
        """
        dim = self.engine.model.dim
        if asked is None or asked == dim:
            return dim
        if asked in self.settings.matryoshka_dims and asked < dim:
            return asked
        allowed = ", ".join(map(str, sorted({*self.settings.matryoshka_dims, dim})))
        raise InvalidRequest(
            f"This model does not support dimensions={asked}. Allowed: {allowed}.",
            param="dimensions",
        )

    async def compute(self, request: Request, sequences: list[Sequence]) -> None:
        """Write the vectors of an admitted request: those that are known, then the others.

        Raises:
            RequestError: the first error of any row.
        """
        engine, missing = self.engine, self.cache.fill(sequences)
        self.lengths.add(sequence.length for sequence in missing)
        n_known = len(sequences) - len(missing)
        if n_known:
            tokens = sum(s.length for s in sequences) - sum(s.length for s in missing)
            engine.admission.release(n_known, tokens, request.key)
        if not missing:
            request.first_start = request.last_end = request.arrival
            self.metrics.texts["ok"].inc(n_known)
            return
        engine.submit(request, missing)
        try:
            error = await request.settled
        except asyncio.CancelledError:
            engine.abandon(request)
            raise
        if error is not None:
            raise error
        self.cache.store(missing)

    def info(self) -> dict[str, Any]:
        """Return what a user may want to know, in plain JSON types."""
        engine, limits = self.engine, self.engine.policy.limits
        errors = self.calibration.held_out_error
        return {
            "id": self.config.name,
            "aliases": self.config.aliases,
            "version": self.settings.name,
            "source": self.settings.source,
            "revision": self.folder.revision,
            "state": engine.state,
            "dim": engine.model.dim,
            "max_length": self.tokenizer.max_length,
            "dtype": engine.model.dtype,
            "device": engine.model.device,
            "slots": engine.device.slots,
            "threads_per_slot": engine.device.threads_per_slot,
            "buckets": engine.policy.buckets.edges,
            "max_batch_tokens": limits.max_batch_tokens,
            "max_batch_size": limits.max_batch_size,
            "truncate": self.settings.truncate,
            "prompts": sorted(self.prompts),
            "matryoshka_dims": self.settings.matryoshka_dims,
            "cost": asdict(self.calibration.cost),
            "cost_error": errors and errors._asdict(),
            "queue": {
                "sequences": engine.admission.sequences,
                "tokens": engine.admission.tokens,
                "seconds": engine.queue_s,
            },
        }


def deploy(
    model_config: ModelConfig, where: str, config: Config, devices: Devices, metrics: Metrics
) -> Deployment:
    """Load, measure and warm up one model; runs on a worker thread for seconds to minutes.

    From the beginning again where its process was killed meanwhile.

    Args:
        model_config: the model; its first version is served.
        where: path of the model in the configuration, for errors.
        config: the whole configuration.
        devices: shared with the other models.
        metrics: of the service.

    Raises:
        StartError: the model cannot be served.
    """
    began = time.perf_counter()
    cache = Cache(config.server.cache_dir)
    for tries_left in reversed(range(TRIES)):
        try:
            deployment = _deploy(model_config, where, devices, cache, metrics)
            break
        except ModelError as error:
            if not (tries_left and error.killed):
                raise
            log.error("model started again name=%s: %s", model_config.name, error)
    log.info("model ready name=%s seconds=%.1f", model_config.name, time.perf_counter() - began)
    return deployment


def _deploy(
    model_config: ModelConfig, where: str, devices: Devices, cache: Cache, metrics: Metrics
) -> Deployment:
    loaded = load(model_config.versions[0], where, cache, devices.owner)
    try:
        return _made_ready(model_config, loaded, devices, cache, metrics)
    except ModelDied as error:
        loaded[2].close()
        raise ModelError(f"{where}: {error}", killed=error.killed) from error
    except BaseException:
        loaded[2].close()
        raise


def _made_ready(
    model_config: ModelConfig,
    loaded: tuple[ModelFolder, Tokenizer, Model],
    devices: Devices,
    cache: Cache,
    metrics: Metrics,
) -> Deployment:
    """Measure and warm up a loaded model."""
    version = model_config.versions[0]
    folder, tokenizer, model = loaded
    device, found = measure(model, folder, version, devices, cache)
    engine_metrics = metrics.version(model_config.name, version.name)
    engine = _engine(model_config.name, version, model, device, found, engine_metrics)
    if version.backend != "hash":
        check_golden(model, folder, cache)
    lengths = _shown_lengths(model.max_length, engine_metrics)
    return Deployment(
        config=model_config,
        settings=version,
        folder=folder,
        tokenizer=tokenizer,
        engine=engine,
        calibration=found,
        cache=VectorCache(version.cache_mib << 20, engine_metrics),
        metrics=engine_metrics,
        lengths=lengths,
        refit=_refit(version, lengths, engine.policy),
        created=int(time.time()),
    )


def _shown_lengths(max_length: int, metrics: VersionMetrics) -> LengthHistogram:
    """Return an empty histogram that the metrics read."""
    lengths = LengthHistogram(max_length)
    metrics.text_tokens_from(lambda: lengths.totals)
    return lengths


def _refit(version: VersionConfig, lengths: LengthHistogram, policy: Policy) -> Refit | None:
    """Return what follows the traffic, where the configuration leaves the edges to it."""
    if version.batching.buckets != "auto":
        return None
    return Refit(lengths, policy.buckets.edges, policy.cost, policy.limits)


def _engine(
    name: str,
    version: VersionConfig,
    model: Model,
    device: Device,
    found: Calibration,
    metrics: VersionMetrics,
) -> Engine:
    metrics.cost_is(asdict(found.cost))
    batching = version.batching
    budget = batching.max_batch_tokens
    limits = Limits(
        max_length=model.max_length,
        max_batch_tokens=found.max_batch_tokens if budget == "auto" else budget,
        max_batch_size=batching.max_batch_size,
        max_batch_delay_s=batching.max_batch_delay_ms / 1000,
        max_age_s=batching.max_age_s,
    )
    edges = first_edges(model.max_length)
    if batching.buckets != "auto":
        edges = sorted({*batching.buckets, model.max_length})
    capacity = max(limits.max_batch_tokens, model.max_length)
    policy = Policy(edges, found.cost, limits)
    warm_up(model, device, policy)
    return Engine(
        name,
        model,
        device,
        policy,
        BufferPool(partial(model.allocate, capacity, limits.max_batch_size), device.slots),
        Admission(batching.max_queue_sequences, batching.max_queue_tokens),
        metrics,
    )
