"""Pooling, dense layers and normalisation against sentence-transformers' modules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from sentence_transformers.base.modules import Dense as ReferenceDense
from sentence_transformers.sentence_transformer.modules import Pooling as ReferencePooling
from torch import Tensor, nn

from embedsvc.errors import ModelError
from embedsvc.models.head import ACTIVATIONS, Normalize, load_dense
from embedsvc.models.pooling import MODES, Pooling, read_pooling

DIM = 8
LENGTHS = torch.tensor([6, 1, 4, 5])
PROMPT = 3
ORDER = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
COMBINATIONS = [*itertools.combinations(ORDER, 1), *itertools.combinations(ORDER, 2), ORDER]


def _hidden() -> Tensor:
    return torch.randn(4, 6, DIM, generator=torch.Generator().manual_seed(0))


def _reference(module: ReferencePooling, lengths: Tensor, prompt: int) -> Tensor:
    mask = (torch.arange(6) < lengths[:, None]).long()
    features = {"token_embeddings": _hidden(), "attention_mask": mask, "prompt_length": prompt}
    pooled: Tensor = module(features)["sentence_embedding"]
    return pooled


@pytest.mark.parametrize("modes", COMBINATIONS, ids="+".join)
def test_modes_equal_the_reference(modes: tuple[str, ...]) -> None:
    """Every mode, every pair and all together equal the reference on padded rows."""
    expected = _reference(ReferencePooling(DIM, modes), LENGTHS, 0)
    found = Pooling(modes)(_hidden(), LENGTHS, torch.zeros(4, dtype=torch.long))

    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", ORDER)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(mode: str, include_prompt: bool) -> None:
    """Leading tokens of a prompt are left out exactly as the reference leaves them out."""
    lengths = torch.tensor([6, 4, 4, 5])
    module = ReferencePooling(DIM, mode, include_prompt=include_prompt)
    pooling = Pooling((mode,), include_prompt)
    found = pooling(_hidden(), lengths, torch.full((4,), PROMPT))

    torch.testing.assert_close(found, _reference(module, lengths, PROMPT))


@pytest.mark.parametrize("mode", ORDER)
def test_rows_have_their_own_prompts(mode: str) -> None:
    """Rows of one batch may have prompts of different lengths, or none."""
    prompts = torch.tensor([2, 0, 3, 1])
    pooling = Pooling((mode,), include_prompt=False)
    together = pooling(_hidden(), LENGTHS, prompts)
    alone = [
        pooling(_hidden()[i : i + 1, : LENGTHS[i]], LENGTHS[i : i + 1], prompts[i : i + 1])
        for i in range(4)
    ]

    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("mode", ORDER)
def test_row_that_is_all_prompt(mode: str) -> None:
    """A row with nothing but prompt is pooled over all of its tokens and stays finite."""
    left_out = Pooling((mode,), include_prompt=False)(_hidden(), LENGTHS, LENGTHS)

    assert left_out.isfinite().all()
    torch.testing.assert_close(left_out, Pooling((mode,))(_hidden(), LENGTHS, LENGTHS))


def test_padding_is_never_read_by_value() -> None:
    """What stands in the padding changes no vector."""
    padding = torch.arange(6) >= LENGTHS[:, None]
    changed = _hidden().masked_fill(padding[:, :, None], 1e4)
    zeros = torch.zeros(4, dtype=torch.long)

    torch.testing.assert_close(
        Pooling(ORDER)(changed, LENGTHS, zeros), Pooling(ORDER)(_hidden(), LENGTHS, zeros)
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "cls"}, Pooling(("cls",))),
        (
            {"pooling_mode": ["mean", "max"], "include_prompt": False},
            Pooling(("mean", "max"), False),
        ),
        (
            {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True},
            Pooling(("lasttoken",)),
        ),
        ({}, Pooling(("mean",))),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            Pooling(("cls", "mean")),
        ),
    ],
)
def test_both_spellings_are_read(config: dict[str, object], expected: Pooling) -> None:
    """Old booleans and the new list give the modes in the reference's order."""
    assert read_pooling(config) == expected


@pytest.mark.parametrize("named", ["sum", ["mean", "sum"], [], 7, [["mean"]]])
def test_unknown_modes_are_refused(named: object) -> None:
    """A mode that is not known is refused, with those that are."""
    with pytest.raises(ModelError, match=r"1_Pooling: unknown pooling .*mean, cls"):
        read_pooling({"pooling_mode": named}, where="1_Pooling")


def test_all_modes_are_tested() -> None:
    """The table of modes holds what the tests above go through."""
    assert set(MODES) == set(ORDER)


def test_normalize() -> None:
    """Rows get length 1; a row of zeros stays."""
    found = Normalize()(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))

    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dense_with_every_activation(name: str, tmp_path: Path) -> None:
    """A saved Dense gives the reference's output, whichever activation it names."""
    activation: nn.Module = getattr(nn, name)()
    reference = ReferenceDense(DIM, 5, activation_function=activation)
    reference.save(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    vectors = torch.randn(3, DIM, generator=torch.Generator().manual_seed(1))
    expected = reference({"sentence_embedding": vectors})["sentence_embedding"]

    torch.testing.assert_close(load_dense(tmp_path, config)(vectors), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation_function": "os.system"}, "unknown activation `os.system`"),
        ({"activation_function": "evil.nn.Tanh"}, "unknown activation `evil.nn.Tanh`"),
        ({"activation_function": "torch.nn.Sequential"}, "unknown activation"),
        ({"module_input_name": "token_embeddings"}, "Dense with input `token_embeddings`"),
        ({"out_features": 6}, "weights do not fit config.json"),
        ({"bias": False}, "weights do not fit config.json"),
        ({"in_features": None}, "config.json lacks in_features or out_features"),
    ],
)
def test_dense_refuses(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    """What Dense cannot run is refused by name, and nothing is imported."""
    weights = {"linear.weight": torch.zeros(5, DIM), "linear.bias": torch.zeros(5)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    config = {"in_features": DIM, "out_features": 5, **changed}

    with pytest.raises(ModelError, match=message):
        load_dense(tmp_path, config)


def test_dense_without_safetensors_is_refused(tmp_path: Path) -> None:
    """Pickled weights are not read."""
    (tmp_path / "pytorch_model.bin").touch()

    with pytest.raises(ModelError, match="only safetensors"):
        load_dense(tmp_path, {"in_features": DIM, "out_features": 5})
