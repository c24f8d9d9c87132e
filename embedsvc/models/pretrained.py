"""What transformers knows of a folder: its tokenizer and how long texts may be.

The one place that asks transformers about a folder before the model is loaded; it is imported here
when a folder is read (2 s), never before. No code of the folder is run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedsvc.errors import ModelError
from embedsvc.models.hub import read_object

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

# Used where neither the model nor its tokenizer states a maximum.
FALLBACK_MAX_LENGTH = 512
# transformers writes 1e30 for "no maximum".
_NO_MAXIMUM = 1_000_000_000

# Architectures with a table of positions: a longer text would read past its end. Others (rotary,
# relative) state the length they were trained with, which a user may exceed.
# fmt: off
_POSITIONS_FROM_ZERO = frozenset((
    "albert", "bert", "bert-generation", "big_bird", "convbert", "deberta", "distilbert", "electra",
    "ernie", "fnet", "gpt2", "gpt_bigcode", "gpt_neo", "layoutlm", "megatron-bert", "mobilebert",
    "nystromformer", "openai-gpt", "opt", "rembert", "roformer", "splinter", "squeezebert",
))
# Here positions start after the padding id, so that the first places of the table are never used.
_POSITIONS_AFTER_PADDING = frozenset((
    "camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A folder's tokenizer and what prompts need to know of it.

    Attributes:
        backend: a private copy, lower-casing as the folder says, without padding or truncation.
        special_ids: ids that transformers calls special; a prompt's length leaves a last one out.
    """

    backend: tokenizers.Tokenizer
    special_ids: frozenset[int]


def open_tokenizer(path: Path, *, lower_case: bool) -> FolderTokenizer:
    """Read a fast tokenizer as transformers does, and lower-case as sentence-transformers does.

    Args:
        path: the Transformer's folder.
        lower_case: `do_lower_case` of sentence-transformers.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    with read_by_transformers("the tokenizer", path):
        loaded: Any = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        special_ids = frozenset(map(int, loaded.all_special_ids))
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{path} has no fast tokenizer ({type(loaded).__name__} is a slow one); save the "
            "tokenizer.json of a fast one beside the model"
        )
    backend.no_truncation()
    backend.no_padding()
    if lower_case:
        _lower_case(backend)
    return FolderTokenizer(backend, special_ids)


def _lower_case(backend: tokenizers.Tokenizer) -> None:
    """Lower-case before all else, unless a step does so already."""
    from tokenizers.normalizers import Lowercase, Sequence

    own = backend.normalizer
    steps: list[Any] = [own] if own is not None else []
    if isinstance(own, Sequence):
        steps = [own[i] for i in range(len(own))]
    if not any(isinstance(step, Lowercase) for step in steps):
        backend.normalizer = Sequence([Lowercase(), *steps])


def token_limits(path: Path, options: dict[str, Any]) -> tuple[int, float]:
    """Return two lengths in tokens: the default maximum, and what the positions allow at all.

    The maximum is what sentence-transformers would take, where the model can read that.

    Args:
        path: the Transformer's folder.
        options: its `sentence_bert_config.json`.

    Raises:
        ModelError: the folder's configuration cannot be read.
    """
    config = _architecture(path)
    position_limit = _position_limit(config)
    length = min(_stated_length(path, options, config), position_limit)
    if length < 1:
        raise ModelError(f"{path} states a maximum length of {length} tokens")
    if length > _NO_MAXIMUM:
        log.warning("no maximum length stated in %s; taking %d tokens", path, FALLBACK_MAX_LENGTH)
        length = FALLBACK_MAX_LENGTH
    return int(length), position_limit


def _stated_length(path: Path, options: dict[str, Any], config: Any) -> float:
    """Return the first that is stated, in the order in which sentence-transformers looks."""
    per_call = (options.get("processing_kwargs") or {}).get("text") or {}
    loading = options.get("processor_kwargs") or options.get("tokenizer_args") or {}
    trained = getattr(config, "max_position_embeddings", None)
    own = read_object(path / "tokenizer_config.json").get("model_max_length")
    candidates = (
        per_call.get("max_length"),
        loading.get("model_max_length"),
        options.get("max_seq_length"),
        min(inf if length in (None, -1) else length for length in (trained, own)),
    )
    stated = next(length for length in candidates if length is not None)
    if not isinstance(stated, int | float):
        raise ModelError(f"{path} states the maximum length {stated!r}, which is not a number")
    return stated


def _position_limit(config: Any) -> float:
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return inf
    if config.model_type in _POSITIONS_AFTER_PADDING:
        # The padding id is 1 in all of these unless their configuration says otherwise.
        padding = getattr(config, "pad_token_id", None)
        return positions - 1 - (1 if padding is None else padding)
    return positions if config.model_type in _POSITIONS_FROM_ZERO else inf


def _architecture(path: Path) -> Any:
    """Return the `PretrainedConfig` of a folder, with the architecture's defaults filled in."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json; is it the folder of a model?")
    with read_by_transformers("config.json", path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


@contextmanager
def read_by_transformers(what: str, path: Path) -> Iterator[None]:
    """Turn whatever transformers raises for a file into a `ModelError`."""
    try:
        yield
    except Exception as error:  # tokenizers raises bare Exception for a bad file
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"transformers cannot read {what} in {path}: {reason}") from error
