"""What a model's folder says: modules, prompts, lengths, weights.

Reads sentence-transformers folders of every age and plain transformers folders. Only configuration
files and hashes: no weights are loaded and no code of the folder is run. Blocks on disk and
network; run it off the event loop.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedsvc.errors import ModelError
from embedsvc.models.hub import MODULES, inside, locate, read_json, read_object
from embedsvc.models.pretrained import open_tokenizer, token_limits
from embedsvc.models.weights import check_pin, find_weights, identify_weights

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

# Every path under which sentence-transformers has saved these four: `models.Pooling`,
# `models.Pooling.Pooling` (to 5.3), `sentence_transformer.modules.pooling.Pooling` (5.4),
# `base.modules.dense.Dense` (6.0), and the packages that re-export them.
_MODULE_TYPE = re.compile(
    r"sentence_transformers\.(?:(?:base|sentence_transformer)\.)?(?:models|modules)\."
    r"(?:\w+\.)?(?P<kind>Transformer|Pooling|Dense|Normalize)"
)
_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# What reading JSON raises that has a number for a table, or is nested without end.
_UNEXPECTED_SHAPES = (
    AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One entry of `modules.json`.

    Attributes:
        kind: `Transformer`, `Pooling`, `Dense` or `Normalize`.
        path: its folder; that of the Transformer holds the tokenizer.
        config: its configuration file as it is; `{}` if there is none.
    """

    kind: str
    path: Path
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model's folder, read and checked.

    Attributes:
        path: the folder.
        source: as the user wrote it.
        revision: commit on the Hub; empty for folders and packages.
        modules: in the order they run; empty for a plain transformers folder.
        max_length: longest text in tokens that sentence-transformers would let through.
        position_limit: longest text in tokens the model can read at all; `inf` without a table
            of positions.
        lower_case: whether texts are lower-cased before the tokenizer's own normalization.
        prompts: by name.
        default_prompt_name: used by requests that name none; empty for none.
        weights: all safetensors files, the Transformer's first.
        weights_id: names the content of the weights; a key for caches.
    """

    path: Path
    source: str
    revision: str
    modules: tuple[ModuleSpec, ...]
    max_length: int
    position_limit: float
    lower_case: bool
    prompts: dict[str, str]
    default_prompt_name: str
    weights: tuple[Path, ...]
    weights_id: str

    @property
    def transformer_path(self) -> Path:
        """The folder with the architecture's `config.json` and the tokenizer."""
        return self.modules[0].path if self.modules else self.path


def resolve(source: str, *, sha256: str = "", where: str = "models[0].source") -> ModelFolder:
    """Find a model, download what is missing, and read all but its weights.

    Args:
        source: a folder, `package:NAME`, or a Hub id with an optional `@revision`.
        sha256: what model.safetensors must hash to; empty does not check.
        where: path of the field in the configuration, for errors.

    Raises:
        ModelError: not found, unsafe, altered or unsupported; starts with `where`.
    """
    try:
        location = locate(source)
        return _read(location.folder, source, location.revision, sha256)
    except ModelError as error:
        raise ModelError(f"{where}: {error}") from error
    except _UNEXPECTED_SHAPES as error:
        raise ModelError(
            f"{where}: a JSON file of {source} has not the shape that it has in a model: {error!r}"
        ) from error


def load_tokenizer(folder: ModelFolder) -> tokenizers.Tokenizer:
    """Return a private copy of the folder's fast tokenizer, without padding or truncation.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    return open_tokenizer(folder.transformer_path, lower_case=folder.lower_case).backend


# --- the folder ----------------------------------------------------------------------------------


def _read(folder: Path, source: str, revision: str, sha256: str) -> ModelFolder:
    modules = _modules(folder)
    transformer = modules[0].path if modules else folder
    options = modules[0].config if modules else {}
    _refuse_unsupported(transformer, options)
    weights = find_weights(transformer, [m.path for m in modules if m.kind == "Dense"])
    if sha256:
        check_pin(weights, sha256)
    max_length, position_limit = token_limits(transformer, options)
    prompts, default_prompt_name = _prompts(folder)
    if not modules:
        log.warning(
            "no %s in %s: a plain transformers folder; `pooling` in the configuration decides "
            "whether its vectors are right",
            MODULES,
            folder,
        )
    return ModelFolder(
        path=folder,
        source=source,
        revision=revision,
        modules=modules,
        max_length=max_length,
        position_limit=position_limit,
        lower_case=options.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        weights=weights,
        weights_id=identify_weights(weights),
    )


def _modules(folder: Path) -> tuple[ModuleSpec, ...]:
    entries = read_json(folder / MODULES)
    if not entries:
        return ()
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ModelError(f"{folder / MODULES} is not a list of modules")
    modules = tuple(_module(folder, entry) for entry in entries)
    kinds = [module.kind for module in modules]
    if kinds[0] != "Transformer" or kinds.count("Transformer") > 1:
        raise ModelError(f"{folder / MODULES} must begin with its only Transformer; it has {kinds}")
    return modules


def _module(folder: Path, entry: dict[str, Any]) -> ModuleSpec:
    stated = str(entry.get("type", ""))
    match = _MODULE_TYPE.fullmatch(stated)
    if match is None:
        raise ModelError(
            f"{folder / MODULES} names the module {stated!r}, which this server does not run; it "
            "runs Transformer, Pooling, Dense and Normalize"
        )
    path = inside(folder, entry.get("path", ""))
    names = _TRANSFORMER_CONFIGS if match["kind"] == "Transformer" else ("config.json",)
    config = next(filter(None, (read_object(path / name) for name in names)), {})
    return ModuleSpec(match["kind"], path, config)


def _refuse_unsupported(path: Path, options: dict[str, Any]) -> None:
    """Refuse settings that change vectors and are not followed here.

    Args:
        path: the Transformer's folder.
        options: its `sentence_bert_config.json`.
    """
    if (path / "adapter_config.json").is_file():
        raise ModelError(f"{path} holds a PEFT adapter; merge it into its base model and save that")
    modality = options.get("modality_config") or {"text": None}
    text = modality.get("text") or {"method": "forward", "method_output_name": "last_hidden_state"}
    per_call = options.get("processing_kwargs") or {}
    unsupported = {
        "transformer_task": options.get("transformer_task", "feature-extraction")
        != "feature-extraction",
        "module_output_name": options.get("module_output_name", "token_embeddings")
        != "token_embeddings",
        "modality_config (it wraps texts in a chat template)": "message" in modality,
        "modality_config": "text" not in modality
        or (text.get("method"), text.get("method_output_name")) != ("forward", "last_hidden_state"),
        "query_expansion": bool(options.get("query_expansion")),
        "processing_kwargs": bool(
            {*per_call.get("text", {}), *per_call.get("common", {})}
            - {"max_length", "padding", "truncation", "return_tensors", "pad_to_multiple_of"}
        ),
    }
    for name, wrong in unsupported.items():
        if wrong:
            raise ModelError(f"{path}: sentence_bert_config.json sets {name}, not supported here")


def _prompts(folder: Path) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the name of the default one."""
    path = folder / "config_sentence_transformers.json"
    settings = read_object(path)
    kind = settings.get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise ModelError(f"{folder} holds a {kind}; this server runs SentenceTransformer models")
    prompts = {str(k): v or "" for k, v in (settings.get("prompts") or {}).items()}
    default = settings.get("default_prompt_name") or ""
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ModelError(f"{path} has a prompt that is not text")
    if default and default not in prompts:
        raise ModelError(f"{path} names the default prompt {default!r}, which it does not have")
    return prompts, default
