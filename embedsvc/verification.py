"""What `embedsvc check` does beyond the file: load every model and look at its vectors.

Golden vectors lie beside the other cached measurements, so that an upgrade of a library that moves
vectors is noticed before an index is filled with two kinds. Runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from embedsvc.config import Config
from embedsvc.deployment import load
from embedsvc.models.cache import Cache
from embedsvc.models.verify import CheckedModel, GoldenResult, check_golden


def verify(config: Config) -> Iterator[tuple[bool, str]]:
    """Load each model in turn; yield whether its vectors are as before, and a line that says so.

    Raises:
        StartError: a model cannot be loaded.
    """
    cache = Cache(config.server.cache_dir)
    for index, model_config in enumerate(config.models):
        version = model_config.versions[0]
        where = f"models[{index}].versions[0].source"
        folder, _, model = load(version, where, cache)
        try:
            name = f"{model_config.name}: {model.dim} dimensions, {model.device}, {model.dtype}"
            if version.backend == "hash":
                yield True, f"{name}; the hash backend has no vectors to verify"
                continue
            result = check_golden(cast(CheckedModel, model), folder, cache)
            yield result.status != "moved", f"{name}; {_in_words(result)}"
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


def _versions(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())
