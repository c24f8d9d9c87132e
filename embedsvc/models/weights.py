"""Which files hold a model's weights, and what names their content.

Safetensors only: a pickle can run code when it is loaded. Blocks on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from embedsvc.errors import ModelError
from embedsvc.models.hub import WEIGHTS, shard_names

# More than this is identified by its headers: hashing 1 GiB takes about a second.
MAX_HASHED_BYTES = 1 << 30
# Source: safetensors' own limit for a header.
_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
_LFS_POINTER = b"version https://git-lfs"


def find_weights(transformer: Path, others: Iterable[Path]) -> tuple[Path, ...]:
    """List the weight files of a model, checking that each is whole.

    Args:
        transformer: folder of the Transformer; its weights may be split.
        others: folders of other modules with weights.

    Raises:
        ModelError: a folder has no safetensors, or a file is damaged.
    """
    files = [file for folder in (transformer, *others) for file in _safetensors(folder)]
    for file in files:
        _header(file)
    return tuple(files)


def _safetensors(folder: Path) -> list[Path]:
    """Return the weight files of one folder; a whole file goes before a split one."""
    whole = folder / WEIGHTS
    files = [whole] if whole.is_file() else [folder / name for name in shard_names(folder)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"{folder} lacks the weight files {', '.join(missing)}")
    if files:
        return files
    pickles = sorted(f.name for pattern in _PICKLES for f in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has its weights only as {', '.join(pickles)}; a pickle can run code when "
            "it is loaded, so only safetensors are read. If you trust it, convert it once: python "
            f'-c \'from sentence_transformers import SentenceTransformer as S; S("{folder}")'
            '.save("NEW_FOLDER")\', and serve NEW_FOLDER'
        )
    raise ModelError(
        f"{folder} has no {WEIGHTS}; if this model is published with pickled weights only, choose "
        "a revision with safetensors, or convert it with sentence-transformers' save() and serve "
        "that folder"
    )


def check_pin(weights: tuple[Path, ...], sha256: str) -> None:
    """Compare model.safetensors of the Transformer with the hash the user expects.

    Raises:
        ModelError: the hashes differ, or there is no single file to hash.
    """
    file = weights[0]
    if file.name != WEIGHTS:
        raise ModelError(f"sha256 pins {WEIGHTS}, but the weights of {file.parent} are split")
    found = _digest(file)
    if found != sha256:
        raise ModelError(
            f"{file} has SHA-256 {found}, but the configuration expects {sha256}; it is not the "
            "file you pinned"
        )


def identify_weights(weights: tuple[Path, ...]) -> str:
    """Return a name for the content of the weights, a key for caches.

    The SHA-256 of the only file, or of all files' hashes; above `MAX_HASHED_BYTES` of headers
    (names, shapes, places) and sizes, which tells architectures apart but not every retraining.
    """
    if sum(file.stat().st_size for file in weights) > MAX_HASHED_BYTES:
        parts = [f"{hashlib.sha256(_header(f)).hexdigest()} {f.stat().st_size}" for f in weights]
    elif len(weights) == 1:
        return _digest(weights[0])
    else:
        parts = [_digest(file) for file in weights]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _header(file: Path) -> bytes:
    """Return the header of a safetensors file after checking that the file is as long as it says.

    Source: the safetensors format: 8 bytes length n, little endian; n bytes JSON with each
    tensor's `data_offsets` counted from the end of the header; the data.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        n = int.from_bytes(first, "little")
        header = stream.read(n) if n <= min(size, _MAX_HEADER_BYTES) else b""
    if _LFS_POINTER.startswith(first) and first:
        raise ModelError(f"{file} is a Git LFS pointer, not the weights; run: git lfs pull")
    try:
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{file} is not a safetensors file") from error
    if 8 + n + end != size:
        raise ModelError(
            f"{file} has {size} bytes instead of {8 + n + end}; it was not copied whole"
        )
    return header
