"""Small tokenizers of every kind, trained on the spot and saved in folders that resolve."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "How do I reset my password? I can't log in to my account since yesterday's update.",
    "def main(argv: list[str]) -> int:\n    return 0 if argv else 1\n",
    "In 2023 the price rose by 12.5 percent, from 1234 to 1388 dollars; then it fell again.",
    "Größe und Übermut: ein naïver Café-Besuch à la carte. Straße, Häuser, Bäume.",
    "Москва слезам не верит, и река течёт дальше. Ещё один день прошёл.",
    "漢字 と ひらがな と カタカナ。 東京 は 大きい 都市 です。",
    "query: passage: search_query: Represent this sentence for retrieval: instruct",
)
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special(content: str, **flags: bool) -> AddedToken:
    """Return a special token that is found before normalization, like those of real models."""
    return AddedToken(content, special=True, normalized=False, **flags)


def wordpiece() -> Tokenizer:
    """BERT: words, `##` pieces, unknown words as a whole."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    )
    tokenizer.post_processor = _template("[CLS] $A [SEP]", tokenizer)
    return tokenizer


def roberta() -> Tokenizer:
    """RoBERTa: byte-level BPE with GPT-2's split, special tokens in the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    _train_bpe(tokenizer, [*names, special("<mask>", lstrip=True)], byte_level=True)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


def qwen() -> Tokenizer:
    """Qwen: NFC, GPT-4's split, added tokens behind the vocabulary, nothing before the text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT4_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train_bpe(tokenizer, [], byte_level=True)
    tokenizer.add_special_tokens([special("<|endoftext|>"), special("<|im_start|>")])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.add_special_tokens([special("<|query|>")])
    tokenizer.post_processor = _template("$A <|endoftext|>", tokenizer)
    return tokenizer


def gpt2() -> Tokenizer:
    """GPT-2: byte-level BPE, no special tokens around the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    _train_bpe(tokenizer, ["<|endoftext|>"], byte_level=True)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def llama2() -> Tokenizer:
    """Llama 2: BPE over the whole text, spaces as `▁`, bytes for what is unknown."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    _train_bpe(tokenizer, names, byte_level=False)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    # Merges made from the vocabulary, as converters do, can produce `</s>`.
    for left, right in (("<", "/"), ("s", ">"), ("</", "s>")):
        for piece in (left, right, left + right):
            data["model"]["vocab"].setdefault(piece, len(data["model"]["vocab"]))
        data["model"]["merges"].append([left, right])
    data["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = _template("<s> $A </s>", tokenizer)
    return tokenizer


def xlm_roberta() -> Tokenizer:
    """XLM-R: Unigram over words, special tokens in its vocabulary with the best score."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([special("<mask>", lstrip=True)])
    tokenizer.post_processor = _template("<s> $A </s>", tokenizer)
    return tokenizer


def gemma() -> Tokenizer:
    """Gemma: like Llama 2 without the prefix, and with tokens that span words."""
    tokenizer = llama2()
    data = json.loads(tokenizer.to_str())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    for left, right in (("e", "▁"), ("s", "\n")):
        for piece in (left, right, left + right):
            vocab.setdefault(piece, len(vocab))
        merges.append([left, right])
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def word_level() -> Tokenizer:
    """Whole words only; a special-token string is a word like others."""
    vocab = {name: i for i, name in enumerate(("<s>", "<pad>", "</s>", "<unk>"))}
    for word in " ".join(CORPUS).split():
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([special(name) for name in ("<s>", "<pad>", "</s>", "<unk>")])
    tokenizer.post_processor = _template("<s> $A </s>", tokenizer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": wordpiece,
    "roberta": roberta,
    "qwen": qwen,
    "gpt2": gpt2,
    "llama2": llama2,
    "gemma": gemma,
    "xlm_roberta": xlm_roberta,
    "word_level": word_level,
}
# Names that transformers needs to know; the rest is found in the tokenizer.
_NAMED: dict[str, dict[str, str]] = {
    "wordpiece": {"pad_token": "[PAD]", "unk_token": "[UNK]", "sep_token": "[SEP]"},
    "qwen": {"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "gpt2": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"},
}
_NAMED["gemma"] = _NAMED["llama2"]
_DEFAULT_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def save_kind(path: Path, kind: str, **config: Any) -> Path:
    """Save a plain transformers folder with a tokenizer of this kind and no real weights."""
    return save_folder(path, KINDS[kind](), {**_NAMED.get(kind, _DEFAULT_NAMES)}, **config)


def save_folder(
    path: Path, tokenizer: Tokenizer, names: dict[str, str] | None = None, **config: Any
) -> Path:
    """Save a plain transformers folder with this tokenizer and no real weights."""
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, **(names or {})).save_pretrained(path)
    settings = {
        "model_type": "bert",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 512,
        **config,
    }
    (path / "config.json").write_text(json.dumps(settings))
    save_file({"weight": np.zeros((2, 2), np.float32)}, path / "model.safetensors")
    return path


def _train_bpe(
    tokenizer: Tokenizer, names: Sequence[str | AddedToken], *, byte_level: bool
) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(names),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)


def _template(single: str, tokenizer: Tokenizer) -> processors.TemplateProcessing:
    names = [name for name in single.split() if name != "$A"]
    ids = [(name, tokenizer.token_to_id(name)) for name in names]
    return processors.TemplateProcessing(single=single, special_tokens=ids)
