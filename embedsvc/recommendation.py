"""What `embedsvc tune` does: lengths from traffic, costs from this device, settings from both.

Loads and measures the first model of the configuration; runs on the calling thread for seconds to
minutes. Measurements are kept in `server.cache_dir` like those of `serve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from embedsvc import __version__
from embedsvc.config import Auto, Config, DeviceConfig, VersionConfig
from embedsvc.engine.calibrate import divisions
from embedsvc.engine.device import Device
from embedsvc.engine.devices import Devices
from embedsvc.engine.measured import calibration, measurement_key
from embedsvc.errors import ConfigError
from embedsvc.loading import load
from embedsvc.models import Model
from embedsvc.models.cache import Cache
from embedsvc.models.host import processor, usable_cores
from embedsvc.models.source import ModelFolder
from embedsvc.tokenization import Tokenizer
from embedsvc.tuning.findings import Findings, as_text, findings, milliseconds, number
from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.judge import Division, Ground, Judge, Measured, Settings
from embedsvc.tuning.lengths import check_enough, cut
from embedsvc.tuning.predict import counts_of
from embedsvc.tuning.report import page
from embedsvc.tuning.rewrite import rewritten
from embedsvc.tuning.search import search
from embedsvc.tuning.sources import Source, read, read_points


@dataclass(slots=True, frozen=True)
class Targets:
    """What the settings are for.

    Attributes:
        slo_s: wanted 99th percentile of the latency, in seconds.
        rate: texts per second to serve; None where it is not known.
        overhead_s: seconds of a request for HTTP and tokenizing.
        n_texts: texts of one simulation.
    """

    slo_s: float
    rate: float | None
    overhead_s: float
    n_texts: int


@dataclass(slots=True, frozen=True)
class Recommendation:
    """What to show and to write.

    Attributes:
        found: the figures.
        toml: the proposed configuration file.
    """

    found: Findings
    toml: str

    def lines(self) -> list[str]:
        """Return what the terminal shows."""
        return [*as_text(self.found)]

    def write(self, output: Path | None, report: Path | None) -> None:
        """Write the configuration and the report, where they are wanted.

        Raises:
            ConfigError: a file cannot be written.
        """
        if output:
            _write("--output", output, self.toml)
        if report:
            _write("--report", report, page(self.found, self.toml))


def recommend(
    config: Config, source: Source, targets: Targets, points: Path | None = None
) -> Recommendation:
    """Search the settings of the configuration's first model.

    Args:
        config: effective configuration.
        source: where the lengths come from.
        targets: what they are for.
        points: file of `bench sweep`, to lay over the predictions.

    Raises:
        StartError: no lengths, or the model cannot be loaded; the message names the flag.
    """
    lengths = read(source, config.models[0].name)
    measured = read_points(points) if points else []
    version = config.models[0].versions[0]
    cache = Cache(config.server.cache_dir)
    folder, tokenizer, model = load(version, "models[0]", cache)
    try:
        counts = _counts(lengths, version, folder, tokenizer, source)
        divisions, present = measured_divisions(config, folder, model, cache)
        ground = Ground(
            lengths=cut(counts, model.max_length),
            divisions=divisions,
            max_age_s=version.batching.max_age_s,
            timeout_s=config.server.timeout_s,
            slo_s=targets.slo_s,
            rate=targets.rate,
            overhead_s=targets.overhead_s,
        )
        facts = _facts(config, source, model, ground)
    finally:
        model.close()
    judge = Judge(ground, targets.n_texts)
    proposal = search(judge, _settings(version, present))
    found = findings(facts, judge, proposal, measured)
    heading = [*(f"{name}: {value}" for name, value in facts.items()), _verdict(found)]
    return Recommendation(found, rewritten(config, model.device, proposal, heading))


def check_writable(**paths: Path | None) -> None:
    """Check before minutes of work that files can be written, each named by its flag.

    Raises:
        ConfigError: one cannot be.
    """
    for flag, path in paths.items():
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"--{flag}: {path} cannot be written: there is no {path.parent}")


def _write(flag: str, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error.strerror}") from None


def _counts(
    lengths: Counts | list[str],
    version: VersionConfig,
    folder: ModelFolder,
    tokenizer: Tokenizer,
    source: Source,
) -> Counts:
    """Return texts by length, tokenized as the server would where they are texts."""
    if not isinstance(lengths, list):
        return lengths
    name = version.default_prompt_name or folder.default_prompt_name
    prompt = (folder.prompts | version.prompts).get(name, "")
    encoded = tokenizer.encode(lengths, truncate="END", prompt=prompt)
    counts = counts_of((len(one.ids) for one in encoded), tokenizer.max_length)
    try:
        check_enough(counts)
    except ConfigError as error:
        raise ConfigError(f"{source.origin} {error}") from None
    return counts


def measured_divisions(
    config: Config, folder: ModelFolder, model: Model, cache: Cache
) -> tuple[tuple[Measured, ...], Division | Auto]:
    """Measure the cost of a loaded model on each division of its device.

    Returns:
        The division that `auto` takes first, then the present one; then, on a CPU, all others. And
        what the configuration says.
    """
    key = measurement_key(folder, model)
    version = config.models[0].versions[0]

    def divided(one: Config) -> Division:
        devices = Devices(one)
        device = devices.get(model, version, cache, key)
        devices.close()
        return Division(device.slots, device.threads_per_slot)

    wanted = [divided(replace(config, devices=[])), divided(config)]
    if model.device == "cpu" and version.backend != "hash":
        wanted += (Division(*one) for one in divisions(usable_cores()))
    found = []
    for division in dict.fromkeys(wanted):
        device = Device(model.device, *division)
        max_rows = version.batching.max_batch_size
        found.append(Measured(division, calibration(model, device, max_rows, cache, key)))
        device.close()
    entry = next((d for d in config.devices if d.name == model.device), DeviceConfig())
    is_auto = entry.slots == entry.threads_per_slot == "auto"
    return tuple(found), "auto" if is_auto else wanted[1]


def _settings(version: VersionConfig, division: Division | Auto) -> Settings:
    batching = version.batching
    buckets = batching.buckets
    return Settings(
        division=division,
        max_batch_tokens=batching.max_batch_tokens,
        max_batch_size=batching.max_batch_size,
        max_batch_delay_ms=batching.max_batch_delay_ms,
        buckets="auto" if buckets == "auto" else tuple(buckets),
    )


def _facts(config: Config, source: Source, model: Model, ground: Ground) -> dict[str, str]:
    name, shown = config.models[0].name, config.models[0].versions[0].source
    machine = f"{processor() or 'unknown processor'}, {usable_cores()} cores"
    if model.device.startswith("cuda"):
        import torch

        machine = f"{torch.cuda.get_device_name(model.device)}; {machine}"
    wanted = f"p99 within {milliseconds(ground.slo_s)} ms"
    if ground.rate is not None:
        wanted += f" at {number(ground.rate)} texts/s"
    return {
        "model": name,
        "source": f"{shown}, {model.dim} dimensions, up to {model.max_length} tokens",
        "device": f"{model.device}, {model.dtype}",
        "machine": machine,
        # An address would look like something the report loads.
        "texts": f"{number(ground.lengths.sum())}, {source.origin.replace('http://', '')}",
        "wanted": f"{wanted}; {milliseconds(ground.overhead_s)} ms of it for HTTP and tokenizing",
        "made by": f"embedsvc {__version__} tune",
    }


def _verdict(found: Findings) -> str:
    present, proposed = found.curves[0], found.curves[-1]
    if found.proposal.present == found.proposal.proposed:
        return f"present settings stay: {number(present.sustained)} texts/s sustained"
    return (
        f"predicted: {number(proposed.sustained)} texts/s sustained within the latency, "
        f"{number(present.sustained)} with the present settings"
    )
