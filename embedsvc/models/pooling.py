"""Pooling: from token vectors to one vector a row.

Pure torch, always float32, on whichever device the tensors are. Rows are padded on the right, so a
row's tokens are `[prompt | text | padding]` with the borders `skip` and `length`; results equal
those of the module of the same name in sentence-transformers. Knows nothing of folders or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embedsvc.errors import ModelError

# The old spelling in Pooling's config.json, one boolean each, in the order of concatenation.
_OLD_SPELLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class Pooling:
    """One vector a row from its token vectors; several modes are concatenated.

    Attributes:
        modes: names out of `MODES`, in the order of concatenation.
        include_prompt: whether the tokens of the prompt take part.
    """

    modes: tuple[str, ...]
    include_prompt: bool = True

    def __call__(self, hidden: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """Pool `hidden (rows, length, dim) float32` to `(rows, dim * len(modes)) float32`.

        Args:
            hidden: token vectors.
            lengths: `(rows,) int64`, tokens of each row, at least 1.
            prompt_lengths: `(rows,) int64`, leading tokens left out unless `include_prompt`. A row
                that is nothing but prompt is pooled over all its tokens: it has no others.
        """
        skip = torch.zeros_like(lengths)
        if not self.include_prompt:
            skip = torch.where(prompt_lengths < lengths, prompt_lengths, skip)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        used = (places >= skip[:, None]) & (places < lengths[:, None])
        rows = _Rows(hidden, used, skip, lengths)
        return torch.cat([MODES[mode](rows) for mode in self.modes], dim=1)


def read_pooling(config: Mapping[str, Any], where: str = "Pooling") -> Pooling:
    """Return the pooling that a module's config.json asks for, in its old or new spelling.

    Raises:
        ModelError: a mode is unknown.
    """
    named = config.get("pooling_mode")
    if named is None:
        chosen = [mode for key, mode in _OLD_SPELLING.items() if config.get(key)]
        modes = tuple(chosen) or ("mean",)
    else:
        modes = tuple(named) if isinstance(named, list | tuple) else (named,)
    unknown = [mode for mode in modes if mode not in list(MODES)]
    if unknown or not modes:
        raise ModelError(
            f"{where}: unknown pooling {', '.join(map(str, unknown)) or '(none)'}; "
            f"known are {', '.join(MODES)}"
        )
    return Pooling(modes, bool(config.get("include_prompt", True)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the modes read.

    Attributes:
        hidden: `(rows, length, dim) float32`.
        used: `(rows, length) bool`, tokens that take part.
        skip: `(rows,) int64`, first of them.
        lengths: `(rows,) int64`, one past the last of them.
    """

    hidden: Tensor
    used: Tensor
    skip: Tensor
    lengths: Tensor

    def at(self, places: Tensor) -> Tensor:
        return self.hidden[torch.arange(len(places), device=places.device), places]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return torch.bmm(weights[:, None, :], self.hidden).squeeze(1)


def _mean(rows: _Rows) -> Tensor:
    weights = rows.used.float()
    return rows.weighted_sum(weights) / weights.sum(dim=1, keepdim=True)


def _mean_sqrt(rows: _Rows) -> Tensor:
    weights = rows.used.float()
    return rows.weighted_sum(weights) / weights.sum(dim=1, keepdim=True).sqrt()


def _weighted_mean(rows: _Rows) -> Tensor:
    # Weights 1, 2, 3 ... by place in the whole row, also where the prompt is left out.
    places = torch.arange(1, rows.used.shape[1] + 1, device=rows.used.device)
    weights = rows.used * places.float()
    return rows.weighted_sum(weights) / weights.sum(dim=1, keepdim=True)


def _max(rows: _Rows) -> Tensor:
    return rows.hidden.masked_fill(~rows.used[:, :, None], float("-inf")).amax(dim=1)


MODES: dict[str, Callable[[_Rows], Tensor]] = {
    "mean": _mean,
    "cls": lambda rows: rows.at(rows.skip),
    "lasttoken": lambda rows: rows.at(rows.lengths - 1),
    "max": _max,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
}
