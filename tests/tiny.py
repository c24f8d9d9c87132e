"""Tiny random models of every architecture, saved as sentence-transformers folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from embedsvc.models import Model
from embedsvc.models.buffers import Vectors
from embedsvc.models.source import ModelFolder, load_tokenizer, resolve
from embedsvc.models.torch import TorchModel

LETTERS = "abcdefghij"
WORDS = tuple(first + second for first in LETTERS for second in LETTERS)
# A leading space belongs to the token in byte-level vocabularies.
SPACED = tuple(f"\u0120{word}" for word in WORDS)
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
VOCABULARY = {token: i for i, token in enumerate((*SPECIALS, *WORDS, *SPACED, *LETTERS, "\u0120"))}
HIDDEN = 32
MAX_LENGTH = 48

_SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
_ENCODER: dict[str, Any] = {
    **_SIZES,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_LENGTH + 2,
}
_DECODER: dict[str, Any] = {**_ENCODER, "num_key_value_heads": 2, "head_dim": 8}

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "bert": transformers.BertConfig(**_ENCODER),
    "roberta": transformers.RobertaConfig(**_ENCODER),
    "xlm-roberta": transformers.XLMRobertaConfig(**_ENCODER),
    "mpnet": transformers.MPNetConfig(**_ENCODER),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=_SIZES["vocab_size"], dim=HIDDEN, hidden_dim=64, n_layers=2, n_heads=4,
        pad_token_id=1, max_position_embeddings=MAX_LENGTH,
    ),
    # A window of 8 tokens, so that padding lies outside every window of a short row.
    "modernbert": transformers.ModernBertConfig(
        **_ENCODER, local_attention=8, layer_types=["full_attention", "sliding_attention"],
        bos_token_id=0, cls_token_id=0, eos_token_id=2, sep_token_id=2,
    ),
    "qwen2": transformers.Qwen2Config(**_ENCODER, num_key_value_heads=2),
    "qwen3": transformers.Qwen3Config(**_DECODER),
    "mistral": transformers.MistralConfig(**_DECODER, sliding_window=8),
    "llama": transformers.LlamaConfig(**_DECODER),
    "gpt2": transformers.GPT2Config(
        vocab_size=_SIZES["vocab_size"], n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=MAX_LENGTH,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    ),
}  # fmt: skip
DECODERS = frozenset({"qwen2", "qwen3", "mistral", "llama", "gpt2"})


def texts(lengths: Sequence[int], seed: int = 0) -> list[str]:
    """Return one text of that many random words for every length."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, n)) for n in lengths]


def network(architecture: str, *, std: float = 0.2) -> transformers.PreTrainedModel:
    """Return a random transformer; the usual initial weights would make all vectors alike.

    Args:
        architecture: a key of `CONFIGS`.
        std: spread of the weights of its layers; the larger, the wilder the attention.
    """
    torch.manual_seed(0)
    built: transformers.PreTrainedModel = transformers.AutoModel.from_config(CONFIGS[architecture])  # type: ignore[no-untyped-call]
    for name, parameter in built.named_parameters():
        norm = parameter.ndim == 1 and name.endswith("weight")
        spread = 1.0 if "embed" in name or "wte" in name else std
        nn.init.normal_(parameter, mean=float(norm), std=spread)
    built.eval()  # type: ignore[no-untyped-call]
    built.requires_grad_(False)
    return built


def save_transformer(path: Path, architecture: str, *, std: float = 0.2) -> Path:
    """Save random weights and a word tokenizer as a plain transformers folder."""
    network(architecture, std=std).save_pretrained(path)
    _tokenizer(decoder=architecture in DECODERS).save_pretrained(path)
    return path


def save_folder(
    path: Path, architecture: str, pooling: Pooling, *more: nn.Module
) -> SentenceTransformer:
    """Save `path / "folder"`: a Transformer with random weights, a Pooling and `more`."""
    plain = save_transformer(path / "plain", architecture)
    transformer = Transformer(str(plain), max_seq_length=MAX_LENGTH)
    reference = SentenceTransformer(modules=[transformer, pooling, *more], device="cpu")
    reference.save(str(path / "folder"), create_model_card=False)
    return reference


def load(path: Path, cache_dir: Path, **options: Any) -> tuple[TorchModel, ModelFolder]:
    """Load a folder in float32 unless told otherwise."""
    folder = resolve(str(path))
    model = TorchModel(folder, cache_dir=cache_dir, device="cpu", **{"dtype": "float32", **options})
    model.load()
    return model, folder


def embed(model: Model, folder: ModelFolder, rows: Sequence[str], *, length: int = 0) -> Vectors:
    """Return the vectors of texts that share one batch, padded to `length` or the longest."""
    tokenizer = load_tokenizer(folder)
    tokenizer.enable_truncation(model.max_length)
    ids = [np.array(e.ids, dtype=np.int64) for e in tokenizer.encode_batch(list(rows))]
    return embed_ids(model, ids, [0] * len(ids), length=length)


def embed_ids(
    model: Model, ids: Sequence[Any], prompt_lengths: Sequence[int], *, length: int = 0
) -> Vectors:
    """Return the vectors of one batch of token ids."""
    length = length or max(map(len, ids))
    buffer = model.allocate(len(ids) * length, len(ids))
    buffer.fill(ids, prompt_lengths, length)
    model.forward(buffer, len(ids), length)
    return buffer.output


def _tokenizer(*, decoder: bool) -> transformers.PreTrainedTokenizerFast:
    backend = _byte_level() if decoder else _word_level()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>" if decoder else "<s> $A </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        unk_token="<unk>", cls_token="<s>", sep_token="</s>", model_max_length=MAX_LENGTH,
        padding_side="left" if decoder else "right",
    )  # fmt: skip


def _word_level() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _byte_level() -> Tokenizer:
    """Return the kind that transformers insists on for Qwen."""
    merges = [(word[0], word[1]) for word in WORDS] + [("\u0120", word) for word in WORDS]
    backend = Tokenizer(models.BPE(VOCABULARY, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend
