"""Lower precision for a transformer's matrix products, everything else left in float32.

The arithmetic is autocast's: inputs, weights and biases of linear layers are rounded, products are
accumulated in float32, the residual stream and the layer norms stay float32. But autocast rounds
every weight again at every forward; here they are held rounded, and on a CPU also in the blocked
order that oneDNN computes with, which it would otherwise make anew at every call.

Measured, MiniLM, one core with AMX, torch 2.13, median ms for 1x8, 8x16, 64x16, 16x64, 4x256
tokens: autocast alone 15.2, 23.7, 68, 70, 82; rounded weights 7.9, 15.0, 59, 61, 74; blocked 6.4,
12.1, 56, 55, 71; query, key and value in one product 5.5, 11.0, 52, 52, 67. Without a gain and so
not here: GELU fused into the product, leaving autocast out, masks built by hand, eager attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from embedsvc.models.host import native_bf16


def lower(network: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Round the linear layers of `network` in place; run it under autocast of the same dtype.

    Args:
        network: a transformer in float32, on `device`.
        dtype: bfloat16 or float16.
        device: where it runs; blocked weights are for bfloat16 on a CPU.
    """
    if device.type == "cpu" and dtype == torch.bfloat16 and _blocked_weights_work():
        # The fused module attends as `sdpa` does; under another setting masks look different.
        if getattr(network.config, "_attn_implementation", "") == "sdpa":
            _fuse_attention(network)
        _replace_linear(network)
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


def round_up_tokens(n_tokens: int) -> int:
    """Return the number of tokens that a product over `n_tokens` is computed with.

    oneDNN compiles a kernel for every number it meets (2.6 ms and 0.7 MB each, measured), and
    batches of texts meet hundreds. Eight numbers an octave cost 3 % of empty rows on average and
    are soon all compiled. Measured, MiniLM, batches of random lengths, one core: 9,050 tokens a
    second without this and 64 kernels kept, 12,300 with it and 256 kept.
    """
    step = max(8, (1 << (n_tokens - 1).bit_length()) // 16)
    return -(-n_tokens // step) * step


def _replace_linear(network: nn.Module) -> None:
    for name, child in list(network.named_children()):
        # Not a subclass: those may use their weight in ways of their own. Autocast serves them.
        if type(child) is nn.Linear:
            setattr(network, name, BlockedLinear(child.weight, child.bias))
        elif isinstance(child, Conv1D):
            setattr(network, name, BlockedLinear(child.weight.t(), child.bias))
        else:
            _replace_linear(child)


@dataclass(frozen=True, slots=True)
class _AttentionNames:
    """What one architecture calls the parts of its self-attention."""

    query: str
    key: str
    value: str
    output: str = ""


# By class name in transformers; a class of another name runs as it is.
_BERT = _AttentionNames("query", "key", "value")
_FUSED = {
    "BertSelfAttention": _BERT,
    "RobertaSelfAttention": _BERT,
    "XLMRobertaSelfAttention": _BERT,
    "DistilBertSelfAttention": _AttentionNames("q_lin", "k_lin", "v_lin", "out_lin"),
}


class FusedSelfAttention(nn.Module):
    """Bidirectional self-attention with query, key and value in one product.

    Stands in for the attention modules of `_FUSED` and answers as they do: the attended vectors and
    no attention weights.
    """

    def __init__(self, attention: nn.Module, names: _AttentionNames) -> None:
        super().__init__()
        parts = [getattr(attention, name) for name in (names.query, names.key, names.value)]
        weight = torch.cat([part.weight for part in parts])
        self.projection = BlockedLinear(weight, torch.cat([part.bias for part in parts]))
        output = getattr(attention, names.output) if names.output else None
        self.output = nn.Identity() if output is None else BlockedLinear(output.weight, output.bias)
        self.head_dim = int(attention.attention_head_size)  # type: ignore[arg-type]  # an int there

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Attend within `(rows, length, dim)`, where the mask allows it.

        Args:
            hidden_states: `(rows, length, dim)`.
            attention_mask: `(rows, 1, length, length) bool`; None allows all.
        """
        rows, length, _dim = hidden_states.shape
        projected = self.projection(hidden_states).view(rows, length, 3, -1, self.head_dim)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, attention_mask)
        return self.output(attended.transpose(1, 2).reshape(rows, length, -1)), None


def _fuse_attention(network: nn.Module) -> None:
    for name, child in list(network.named_children()):
        names = _FUSED.get(type(child).__name__)
        if names is not None and not getattr(child, "is_decoder", False):
            setattr(network, name, FusedSelfAttention(child, names))
        else:
            _fuse_attention(child)
