"""The first steps of a start: a version's folder is found, its tokenizer and its model are loaded.

Runs on the thread that starts a model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

from embedsvc.config import VersionConfig
from embedsvc.errors import ConfigError, ModelError
from embedsvc.models import Model, isolated, load_model
from embedsvc.models.cache import Cache
from embedsvc.models.owner import Owner
from embedsvc.models.source import ModelFolder, resolve
from embedsvc.tokenization import Tokenizer

# Understood by every model, as no prompt where it has none of that name.
EVERY_MODELS_PROMPTS = ("", "query", "document", "passage")


def load(
    version: VersionConfig, where: str, cache: Cache, owner: Owner | None = None
) -> tuple[ModelFolder, Tokenizer, Model]:
    """Return the folder, the tokenizer and the loaded model of a version.

    Args:
        version: of the model.
        where: path of the model in the configuration.
        cache: knows outcomes of self-checks.
        owner: of the processes that this worker shares with others.

    Raises:
        StartError: one of them cannot be had; the message starts with `where`.
    """
    folder = resolve(version.source, sha256=version.sha256, where=f"{where}.source")
    max_length = folder.max_length if version.max_length == "auto" else version.max_length
    _check_settings(version, folder, max_length, f"{where}.versions[0]")
    try:
        with ThreadPoolExecutor(1) as beside:
            opening = beside.submit(Tokenizer, folder, max_length)
            if not isolated(version):
                # The model would import the same modules in this process at the same time.
                wait([opening])
            model = load_model(version, folder, cache.directory, owner)
            try:
                return folder, opening.result(), model
            except BaseException:
                model.close()
                raise
    except ModelError as error:
        raise ModelError(f"{where}: {error}", killed=error.killed) from error


def _check_settings(
    version: VersionConfig, folder: ModelFolder, max_length: int, where: str
) -> None:
    """Refuse what only shows beside the model's own settings."""
    buckets, default = version.batching.buckets, version.default_prompt_name
    if buckets != "auto" and buckets[-1] > max_length:
        raise ConfigError(
            f"{where}.batching.buckets: the last edge is {buckets[-1]}, over max_length "
            f"{max_length}"
        )
    known = {*folder.prompts, *version.prompts, *EVERY_MODELS_PROMPTS}
    if default not in known:
        raise ConfigError(
            f"{where}.default_prompt_name: the model has no prompt '{default}'. Known: "
            f"{', '.join(sorted(known - {''}))}."
        )
