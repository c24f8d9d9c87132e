"""What follows the transformer: the pooling, and the layers on text vectors.

Reads the modules of a sentence-transformers folder, or chooses a pooling for a plain one. All of it
runs in float32; results equal those of the modules of the same names in sentence-transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn

from embedsvc.errors import ModelError
from embedsvc.models.pooling import Pooling, read_pooling

if TYPE_CHECKING:
    from embedsvc.models.source import ModelFolder

log = logging.getLogger(__name__)


def read_head(folder: ModelFolder, pooling: str, config: Any) -> tuple[Pooling, nn.Sequential]:
    """Return what follows the transformer: the pooling, and the layers on text vectors.

    Raises:
        ModelError: the modules do not fit together, or `pooling` contradicts the folder's own.
    """
    if not folder.modules:
        return _plain_pooling(folder, pooling, config), nn.Sequential()
    kinds = [module.kind for module in folder.modules]
    if kinds[1:2] != ["Pooling"] or kinds.count("Pooling") > 1:
        raise ModelError(f"{folder.source}: needs one Pooling after the Transformer, has {kinds}")
    own = read_pooling(folder.modules[1].config, where=str(folder.modules[1].path))
    if pooling not in ("auto", "+".join(own.modes)):
        raise ModelError(
            f"{folder.source}: pooling is `{pooling}`, but the folder's own is "
            f"`{'+'.join(own.modes)}`; leave `pooling` out"
        )
    layers: list[nn.Module] = []
    for module in folder.modules[2:]:
        dense = module.kind == "Dense"
        layers.append(load_dense(module.path, module.config) if dense else Normalize())
    return own, nn.Sequential(*layers).eval().requires_grad_(False)


def _plain_pooling(folder: ModelFolder, pooling: str, config: Any) -> Pooling:
    if pooling == "auto":
        # As sentence-transformers chooses for such a folder.
        named = (getattr(config, "architectures", None) or [""])[0]
        decoder = named.endswith("ForCausalLM") and getattr(config, "is_causal", True)
        pooling = "lasttoken" if decoder else "mean"
        log.warning(
            "the folder names no pooling, guessing; set `pooling` to be sure source=%s pooling=%s",
            folder.source, pooling,
        )  # fmt: skip
    return read_pooling({"pooling_mode": pooling})


def output_dim(hidden_size: int, pooling: Pooling, head: nn.Sequential, folder: ModelFolder) -> int:
    """Return the components of a vector after all modules.

    Raises:
        ModelError: a Dense takes another number of components than it is given.
    """
    dim = hidden_size * len(pooling.modes)
    for layer in head:
        if not isinstance(layer, Dense):
            continue
        takes = layer.linear.in_features
        if takes != dim:
            raise ModelError(f"{folder.source}: a Dense takes {takes} components, is given {dim}")
        dim = layer.linear.out_features
    return dim


class Normalize(nn.Module):
    """Scales every row to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Normalise `(rows, dim) float32`."""
        return nn.functional.normalize(vectors, dim=-1)


class Dense(nn.Module):
    """A linear layer, an activation, optionally the input added again.

    Args:
        linear: `(in_features, out_features)`.
        activation: applied to the layer's output.
        residual: maps the input to what is added; None adds nothing.
    """

    def __init__(
        self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None
    ) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual = residual

    def forward(self, vectors: Tensor) -> Tensor:
        """Map `(rows, in_features) float32` to `(rows, out_features) float32`."""
        mapped: Tensor = self.activation(self.linear(vectors))
        return mapped if self.residual is None else mapped + self.residual(vectors)


def load_dense(folder: Path, config: Mapping[str, Any]) -> Dense:
    """Build a Dense module from its folder.

    Raises:
        ModelError: weights are missing or of another shape, or the activation or input is unknown.
    """
    for end in ("input", "output"):
        name = config.get(f"module_{end}_name")
        if name not in (None, "sentence_embedding"):
            raise ModelError(f"{folder}: Dense with {end} `{name}` is not supported")
    activation = _activation(config.get("activation_function", "torch.nn.Tanh"), folder)
    n_in, n_out = config.get("in_features"), config.get("out_features")
    if not isinstance(n_in, int) or not isinstance(n_out, int):
        raise ModelError(f"{folder}: config.json lacks in_features or out_features")
    parts = nn.ModuleDict({"linear": nn.Linear(n_in, n_out, bias=bool(config.get("bias", True)))})
    if config.get("use_residual") and n_in != n_out:
        parts["residual"] = nn.Linear(n_in, n_out, bias=False)
    _load_weights(parts, folder)
    residual = None
    if config.get("use_residual"):
        residual = parts["residual"] if "residual" in parts else nn.Identity()
    linear = parts["linear"]
    assert isinstance(linear, nn.Linear)
    return Dense(linear, activation, residual)


def _load_weights(module: nn.Module, folder: Path) -> None:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{folder}: no model.safetensors; only safetensors weights are read")
    weights = {name: tensor.float() for name, tensor in load_file(path).items()}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise ModelError(f"{path}: weights do not fit config.json: {error}") from None


# Classes without arguments that Dense may name. A fixed table: a name is never imported.
ACTIVATIONS: dict[str, type[nn.Module]] = {
    activation.__name__: activation
    for activation in (
        nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
        nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU,
        nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink,
    )
}  # fmt: skip


def _activation(name: str | None, folder: Path) -> nn.Module:
    if name is None:
        return nn.Identity()
    package, _, last = name.rpartition(".")
    if last not in ACTIVATIONS or not package.startswith("torch.nn"):
        raise ModelError(
            f"{folder}: unknown activation `{name}`; of torch.nn are known {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[last]()
