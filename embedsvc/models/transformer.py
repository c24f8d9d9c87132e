"""The transformer of a folder: loaded in float32, and what its batches may look like.

Only architectures that transformers itself knows, only safetensors, no code of the folder.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from embedsvc.errors import ModelError

# Every token sees only those before it, so what follows a row's end cannot reach it and no mask is
# needed. Each of these is tested; an architecture that is not listed always gets a mask.
_CAUSAL = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})


def load_transformer(path: Path) -> Any:
    """Return the transformer of a folder in float32, without any head of its own.

    Raises:
        ModelError: the architecture is unknown or unsuitable, or weights are missing.
    """
    _quiet_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        _check_architecture(path, config)
        _choose_kernels(config)
        network, info = transformers.AutoModel.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **_without_pooler(config),
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(f"{path}: transformers cannot load the weights: {error}") from error
    # transformers fills what is missing with random numbers.
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} weights are missing, e.g. {', '.join(missing[:3])}"
        )
    network.config.use_cache = False
    return network.eval().requires_grad_(False)


def _quiet_transformers() -> None:
    """Progress bars only for people; what it says about unused weights is checked by ourselves."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _check_architecture(path: Path, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path}: {config.model_type} has an encoder and a decoder; unsupported")

    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path}: its weights are quantized, which is not supported")


def _choose_kernels(config: Any) -> None:
    """Leave the choice of how to compute to transformers.

    A folder may name a repository of the Hub as its attention, whose code transformers would
    download and run where the package `kernels` is installed.
    """
    for choice in ("_attn_implementation", "_experts_implementation"):
        if getattr(config, choice, None) != "eager":
            setattr(config, choice, None)


def _without_pooler(config: Any) -> dict[str, bool]:
    """Leave out the layer that BERT-like models put on the first token; nothing here reads it."""
    network: Any = transformers.MODEL_MAPPING[type(config)]
    accepts = "add_pooling_layer" in inspect.signature(network).parameters
    return {"add_pooling_layer": False} if accepts else {}


def pad_id(config: Any) -> int:
    """Return the id that fills the tail of a row: the model's own, or any where it has none."""
    own = getattr(config, "pad_token_id", None)
    return own if isinstance(own, int) and 0 <= own < getattr(config, "vocab_size", 0) else 0


def is_causal(config: Any) -> bool:
    """Say whether no token sees what follows it."""
    return config.model_type in _CAUSAL and bool(getattr(config, "is_causal", True))
