"""Lower precision for a transformer's matrix products, everything else left in float32.

The arithmetic is autocast's: inputs, weights and biases of linear layers are rounded, products are
accumulated in float32, the residual stream and the layer norms stay float32. But autocast rounds
every weight again at every forward; here they are held rounded, and on a CPU also in the blocked
order that oneDNN computes with, which it would otherwise make anew at every call.

Measured, MiniLM, one core with AMX, torch 2.13, median ms for 1x8, 8x16, 64x16, 16x64, 4x256
tokens: autocast alone 15.2, 23.7, 68, 70, 82; rounded weights 7.9, 15.0, 59, 61, 74; blocked 6.4,
12.1, 56, 55, 71. Without a gain and so not here: GELU fused into the product, leaving autocast
out, masks built by hand, eager attention.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from embedsvc.models.encoder import Encoder
from embedsvc.models.host import native_bf16
from embedsvc.models.rounding import round_up_tokens


def lower(network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Round the linear layers of `network` in place; run it under autocast of the same dtype.

    Args:
        network: a transformer in float32, on `device`.
        dtype: bfloat16 or float16.
        device: where it runs; blocked weights are for bfloat16 on a CPU.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and _blocked_weights_work():
        _replace_linear(network)
        if isinstance(network, Encoder):
            network.script()
        return
    for module in network.modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.to(dtype)


def _blocked_weights_work() -> bool:
    return native_bf16() and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


class BlockedLinear(nn.Module):
    """A linear layer with bfloat16 weights in oneDNN's blocked order.

    Args:
        weight: `(out_features, in_features)`, any dtype.
        bias: `(out_features,)` or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        rounded = weight.detach().bfloat16().contiguous()
        # A plain attribute: some architectures ask a layer for `weight.dtype`.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(rounded, None)
        self.bias = None if bias is None else bias.detach().bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features) bfloat16`."""
        n_tokens = inputs.shape[:-1].numel()
        flat = inputs.reshape(n_tokens, -1)
        room = round_up_tokens(n_tokens)
        if room != n_tokens:
            # The rows behind the tokens hold anything: no row of a product sees another.
            roomy = torch.empty(room, flat.shape[1], dtype=torch.bfloat16)
            roomy[:n_tokens] = flat
            flat = roomy
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            flat.to(torch.bfloat16), self.weight, self.bias, "none", [], ""
        )
        return product[:n_tokens].view(*inputs.shape[:-1], -1)


def _replace_linear(network: nn.Module) -> None:
    for name, child in list(network.named_children()):
        # Not a subclass: those may use their weight in ways of their own. Autocast serves them.
        if type(child) is nn.Linear:
            setattr(network, name, BlockedLinear(child.weight, child.bias))
        elif isinstance(child, Conv1D):
            setattr(network, name, BlockedLinear(child.weight.t(), child.bias))
        else:
            _replace_linear(child)
