"""`TorchModel`: a sentence-transformers folder, or a plain transformers one, run by PyTorch.

Loads the transformer in float32, lowers the precision of its matrix products where the device gains
by it, checks that the vectors survive that, and runs the folder's modules. `forward` is called by
several device threads at once and shares nothing between them but the weights. Knows token ids, no
texts (save the built-in ones of the self-check), no requests.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedsvc.models.host import native_bf16, set_native_memory

set_native_memory()

import torch  # noqa: E402  # reads the variables set above when it is loaded
from torch import Tensor, nn  # noqa: E402

from embedsvc.errors import DeviceLost, DeviceOutOfMemory, ModelError  # noqa: E402
from embedsvc.models import verify  # noqa: E402
from embedsvc.models.cache import Cache  # noqa: E402
from embedsvc.models.encoder import streamlined  # noqa: E402
from embedsvc.models.head import output_dim, read_head  # noqa: E402
from embedsvc.models.inprocess import InProcess  # noqa: E402
from embedsvc.models.precision import lower  # noqa: E402
from embedsvc.models.source import load_tokenizer  # noqa: E402
from embedsvc.models.threads import batch_threads  # noqa: E402
from embedsvc.models.transformer import is_causal, load_transformer, pad_id  # noqa: E402

if TYPE_CHECKING:
    from embedsvc.models.buffers import HostBuffer, Vectors
    from embedsvc.models.source import ModelFolder

log = logging.getLogger(__name__)

# Weights above this are not self-checked: the float32 forward would delay the start for minutes.
MAX_SELF_CHECK_BYTES = 1 << 30

# How torch words a CPU without memory: its allocator's failure, and that of the libraries it calls.
_CPU_OUT_OF_MEMORY = ("DefaultCPUAllocator", "std::bad_alloc")


class _Thread(threading.local):
    """What was set for the calling thread."""

    threads = 0
    guard: torch.inference_mode


_THREAD = _Thread()


def prepare_thread() -> None:
    """Make the calling thread ready for batches, where `set_batch_threads` was called on it.

    Sets its CPU threads and inference mode; both hold for this thread alone and until it ends. (A
    thread for which nobody did takes the number of threads set last.)
    """
    threads = batch_threads()
    if threads == _THREAD.threads:
        return
    _THREAD.threads = threads
    # A thread's first use of torch sets its number to the last one set anywhere; reading the
    # number is such a use, so that what is set after it stays.
    torch.get_num_threads()
    torch.set_num_threads(threads)
    if not torch.is_inference_mode_enabled():
        # The mode ends when the guard is freed, so the thread's own storage keeps it.
        _THREAD.guard = torch.inference_mode()
        _THREAD.guard.__enter__()


class TorchModel(InProcess):
    """One set of weights on one device.

    Args:
        folder: where the weights and modules are.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: precision of the matrix products: `auto`, `float32`, `bfloat16` or `float16`.
        pooling: for a folder without a Pooling module; `auto` takes what sentence-transformers
            would.
        max_length: longest sequence in tokens; None takes the folder's.
        cache_dir: where the outcome of the self-check is kept.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        device: str = "auto",
        dtype: str = "auto",
        pooling: str = "auto",
        max_length: int | None = None,
        cache_dir: Path,
    ) -> None:
        self.dim = 0
        self.max_length = folder.max_length if max_length is None else max_length
        self.pad_id = 0
        self.dtype = dtype
        self.device = device
        self._folder = folder
        self._pooling_name = pooling
        self._cache = Cache(cache_dir)
        self._device = torch.device("cpu")
        self._compute_dtype = torch.float32
        self._network: Any = nn.Identity()
        self._head = nn.Sequential()
        self._masked = True

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the vectors depend on besides the folder and library versions, as JSON types."""
        return {
            "pooling": list(self._pooling.modes),
            "include_prompt": self._pooling.include_prompt,
            "max_length": self.max_length,
            "dtype": self.dtype,
            "device": self._device.type,
        }

    def load(self) -> None:
        """Load the weights, lower their precision, check the vectors.

        Raises:
            ModelError: the folder, device or dtype cannot be used, or the dtype changes the
                vectors too much.
        """
        self._check_max_length()
        self._device = choose_device(self.device)
        self.device = str(self._device)
        dtype = choose_dtype(self.dtype, self._device)
        network = load_transformer(self._folder.transformer_path)
        self._network = streamlined(network).to(self._device)
        config = self._network.config
        self._masked = not is_causal(config)
        self._pooling, head = read_head(self._folder, self._pooling_name, config)
        self._head = head.to(self._device)
        self.dim = output_dim(self._hidden_size(), self._pooling, head, self._folder)
        self.pad_id = pad_id(config)
        self.dtype = "float32"
        if dtype != torch.float32:
            self._lower(dtype)

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Compute `buffer.output[:rows]`; device threads, several at once.

        Args:
            buffer: filled input arrays; only `output` is written.
            rows: rows in use.
            length: padded length in tokens.

        Raises:
            DeviceOutOfMemory: a smaller batch may fit.
            DeviceLost: nothing runs on the device any more.
        """
        prepare_thread()
        try:
            self._forward(buffer, rows, length)
        except (RuntimeError, MemoryError) as error:
            if _is_out_of_memory(error):
                raise DeviceOutOfMemory(str(error)) from error
            if device_works(self._device):
                raise
            raise DeviceLost(str(error)) from error

    def _forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        with torch.inference_mode():
            ids = self._on_device(torch.from_numpy(buffer.grid(rows, length)))
            lengths = self._on_device(torch.from_numpy(buffer.lengths[:rows]))
            prompts = self._on_device(torch.from_numpy(buffer.prompt_lengths[:rows]))
            padded = int(buffer.lengths[:rows].min()) < length
            hidden = self._hidden(ids, lengths, padded=padded).float()
            vectors = self._head(self._pooling(hidden, lengths, prompts))
            torch.from_numpy(buffer.output)[:rows].copy_(vectors)

    def close(self) -> None:
        """Free the weights; `forward` must not be called any more."""
        self._network = nn.Identity()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_max_length(self) -> None:
        if self.max_length > self._folder.position_limit:
            raise ModelError(
                f"max_length {self.max_length} is more than the {self._folder.position_limit:.0f} "
                f"positions of {self._folder.source}; set a smaller max_length"
            )

    def _hidden_size(self) -> int:
        """Return the components of a token vector, by computing one."""
        one = torch.ones(1, 1, dtype=torch.long, device=self._device)
        try:
            with torch.inference_mode():
                return int(self._hidden(one, one[0], padded=False).shape[-1])
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self._folder.source}: {self._network.config.model_type} does not turn tokens "
                f"into vectors: {error}"
            ) from error

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _hidden(self, ids: Tensor, lengths: Tensor, *, padded: bool) -> Tensor:
        """Return the token vectors `(rows, length, hidden_size)` of `ids (rows, length)`."""
        mask = None
        if padded and self._masked:
            places = torch.arange(ids.shape[1], device=self._device)
            mask = (places < lengths[:, None]).long()
        with self._autocast():
            hidden: Tensor = self._network(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._compute_dtype == torch.float32:
            return contextlib.nullcontext()
        # Weights are held rounded, so there is nothing to keep in autocast's own cache.
        return torch.autocast(self._device.type, self._compute_dtype, cache_enabled=False)

    def _lower(self, dtype: torch.dtype) -> None:
        """Lower the precision to `dtype` and refuse it where the vectors do not survive."""
        name = str(dtype).removeprefix("torch.")
        key = {
            "kind": "self-check",
            "weights": self._folder.weights_id,
            "settings": {**self.settings, "dtype": name},
            "versions": verify.versions(),
        }
        known = self._cache.get(key)
        reference = None if known else self._reference()
        lower(self._network, dtype, self._device)
        self._compute_dtype, self.dtype = dtype, name
        if known:
            cosine = float(known["cosine"])
        elif reference is None:
            return
        else:
            cosine = verify.lowest_cosine(self._probe(), reference)
            self._cache.put(key, {"cosine": cosine})
        log.info("self-check against float32 dtype=%s cosine=%.6f", name, cosine)
        if cosine < verify.MIN_SELF_CHECK_COSINE:
            raise ModelError(
                f"{self._folder.source}: vectors in {name} have cosine {cosine:.4f} with those in "
                f'float32, under {verify.MIN_SELF_CHECK_COSINE}; set dtype = "float32"'
            )

    def _reference(self) -> Vectors | None:
        """Return the float32 vectors of the built-in texts, or None for a model too large."""
        size = sum(file.stat().st_size for file in self._folder.weights)
        if size > MAX_SELF_CHECK_BYTES:
            log.info("self-check skipped: more than 1 GiB of weights gib=%.1f", size / (1 << 30))
            return None
        return self._probe()

    def _probe(self) -> Vectors:
        tokenizer = load_tokenizer(self._folder)
        return verify.probe(self, tokenizer, long_text_tokens=verify.MAX_PROBE_TOKENS)


def _is_out_of_memory(error: Exception) -> bool:
    """Say whether a device had no memory; on a CPU torch tells it only by the words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in _CPU_OUT_OF_MEMORY)


def choose_device(name: str) -> torch.device:
    """Return the device of a configured name.

    Raises:
        ModelError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    place = int(index) if index.isdigit() else 0
    if kind != "cuda" or (index and not index.isdigit()):
        raise ModelError(f"device `{name}` is unknown; use auto, cpu, cuda or cuda:N")
    if place >= torch.cuda.device_count():
        raise ModelError(f"device `{name}`: {torch.cuda.device_count()} CUDA devices were found")
    return torch.device("cuda", place)


def device_works(device: torch.device) -> bool:
    """Say whether a device still does anything for this process.

    After a failed assertion or an illegal access every call of CUDA fails until the process ends.
    """
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
    except (RuntimeError, AssertionError):
        return False
    return True


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the precision of the matrix products; `auto` takes bfloat16 where it is native."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16
    return torch.bfloat16 if native_bf16() else torch.float32
