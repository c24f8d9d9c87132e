"""What a server and the process of an isolated model say to each other.

Over one *control* socket, MessagePack: `Spec` goes out, `Ready` or `Failed` comes back; afterwards
it carries only descriptors, the far ends of *channels*, and its end tells the process that nobody
needs it any more. Each channel carries one batch at a time as a few integers: `Op.RUN` is answered
by a `Status`; `Op.ADD` (with the descriptor of its memory) and `Op.DROP` make a buffer known and
forgotten on this channel and are not answered. All sockets keep the bounds of messages.

Channels know nothing of each other, so several workers may use one process. Their supervisor owns
it: each asks for it with `Attach` (see `owner.py`), and gets `Attached` with a descriptor of the
control socket to send its own channels, or `Failed`. The socket on which that came stays open as
long as the worker needs the process; on it `KILL` goes out, and `Gone` comes when it is gone.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from embedsvc.config import VersionConfig
from embedsvc.models.source import ModelFolder

# One of `Op`, then its numbers:
#   RUN   buffer  rows             length    CPU threads (0: as they are)
#   ADD   buffer  capacity_tokens  max_rows  0
#   DROP  buffer  0                0         0
REQUEST = struct.Struct("<5I")
REPLY = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 20
MAX_FAILURE_CHARACTERS = 4000


class Op(IntEnum):
    """What is asked of the process on a channel."""

    RUN = 1
    ADD = 2
    DROP = 3


class Status(IntEnum):
    """How a batch ended."""

    OK = 0
    OUT_OF_MEMORY = 1
    FAILED = 2
    DEVICE_LOST = 3


class Spec(Struct, frozen=True):
    """What to load: files that were found and checked by the server, so nobody does so again.

    Attributes:
        version: the version's configuration.
        folder: the model's files.
        cache_dir: where the outcome of the self-check is kept.
        log_level: least severity of the lines that are worth writing.
    """

    version: VersionConfig
    folder: ModelFolder
    cache_dir: Path
    log_level: int


class Ready(Struct, frozen=True, tag=True):
    """The model is loaded; these are its attributes of the same names."""

    dim: int
    max_length: int
    pad_id: int
    dtype: str
    device: str
    settings: dict[str, Any]


class Failed(Struct, frozen=True, tag=True):
    """The model cannot be loaded; `killed` as in `ModelError`."""

    message: str
    killed: bool = False


class Attach(Struct, frozen=True, tag=True):
    """From a worker: the process that has loaded this, started where there is none.

    Attributes:
        worker: the module it runs.
        spec: what it loads.
    """

    worker: str
    spec: Spec


class Share(Struct, frozen=True, tag=True):
    """From a worker: a device's slots, to be granted on the socket that comes with it."""

    device: str
    n_slots: int


class Attached(Struct, frozen=True, tag=True):
    """The process that was asked for is ready.

    Attributes:
        pid: its process id.
        warm: workers have run their batches on it before.
        load_s: seconds it took until it was ready, for whoever waited all the time.
        ready: what it said.
    """

    pid: int
    warm: bool
    load_s: float
    ready: Ready


class Gone(Struct, frozen=True, tag=True):
    """The process is gone; `how` says so in words."""

    how: str


KILL = b"k"

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_specs = msgspec.msgpack.Decoder(Spec, dec_hook=lambda kind, value: kind(value))
_answers = msgspec.msgpack.Decoder(Ready | Failed)
_wishes = msgspec.msgpack.Decoder(Attach | Share, dec_hook=lambda kind, value: kind(value))
_tidings: msgspec.msgpack.Decoder[Attached | Failed | Gone]
_tidings = msgspec.msgpack.Decoder(Attached | Failed | Gone)


def encode(message: Spec | Ready | Failed | Attach | Share | Attached | Gone) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_spec(message: bytes) -> Spec:
    """Return what to load."""
    return _specs.decode(message)


def decode_answer(message: bytes) -> Ready | Failed:
    """Return what came of loading."""
    return _answers.decode(message)


def decode_wish(message: bytes) -> Attach | Share:
    """Return what a worker asks its supervisor for."""
    return _wishes.decode(message)


def decode_tidings(message: bytes) -> Attached | Failed | Gone:
    """Return what a supervisor says of a process."""
    return _tidings.decode(message)
