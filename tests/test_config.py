"""The configuration file: what it becomes, and how its mistakes are told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from embedsvc.config import DEFAULT_SHA256, DEFAULT_SOURCE
from embedsvc.configfile import Overrides, load, model_name
from embedsvc.errors import ConfigError

VERSION = '[[models]]\nname = "m"\n[[models.versions]]\nsource = "org/m"\n'
BATCHING = VERSION + "[models.versions.batching]\n"


@pytest.fixture
def write(tmp_path: Path) -> Path:
    """Return the path of a configuration file to be written."""
    return tmp_path / "config.toml"


def mistake(path: Path, text: str) -> str:
    """Return the message that refuses a file with this text."""
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    return str(refused.value)


def test_nothing_given_serves_the_embedded_default() -> None:
    """Without a file and flags the packaged MiniLM is served, its weights pinned."""
    config = load()

    assert [model.name for model in config.models] == ["all-MiniLM-L6-v2"]
    assert config.models[0].aliases == []
    assert [version.source for version in config.models[0].versions] == [DEFAULT_SOURCE]
    assert config.models[0].versions[0].sha256 == DEFAULT_SHA256
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)


def test_a_model_flag_serves_that_model_without_a_pin() -> None:
    """`--model` names the model after its source and pins nothing but the default."""
    config = load(None, Overrides(model="BAAI/bge-small-en-v1.5@main"))

    assert config.models[0].name == "BAAI/bge-small-en-v1.5"
    assert config.models[0].versions[0].source == "BAAI/bge-small-en-v1.5@main"
    assert config.models[0].versions[0].sha256 == ""


def test_flags_win_over_the_file(write: Path) -> None:
    """Host, port, device, dtype and backend replace the file's values; the rest stays."""
    write.write_text('[server]\nport = 1\ntimeout_s = 5\n[[models]]\nname = "m"\nsource = "org/m"')

    config = load(write, Overrides(port=2, host="::", device="cuda:1", dtype="float32"))

    assert (config.server.host, config.server.port, config.server.timeout_s) == ("::", 2, 5.0)
    version = config.models[0].versions[0]
    assert (version.device, version.dtype, version.backend) == ("cuda:1", "float32", "auto")


def test_the_shorthand_becomes_a_version(write: Path) -> None:
    """`source` under a model is one version v1, so that nothing else knows of the shorthand."""
    write.write_text('[[models]]\nname = "m"\nsource = "org/m"')

    model = load(write).models[0]

    assert model.source == ""
    assert [(version.name, version.source) for version in model.versions] == [("v1", "org/m")]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (DEFAULT_SOURCE, "all-MiniLM-L6-v2"),
        ("package:some-weights", "some-weights"),
        ("org/name", "org/name"),
        ("org/name@v1.0", "org/name"),
        ("/models/my model/", "my-model"),
        ("./tiny", "tiny"),
        ("~/models/tiny", "tiny"),
    ],
)
def test_names_come_from_sources(source: str, name: str) -> None:
    """A model given by its source alone gets a name that clients can type."""
    assert model_name(source) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprt = 1", "server.prt: unknown key, did you mean port?"),
        ("[sever]\nport = 1", "sever: unknown key, did you mean server?"),
        ("[[devices]]\nzzz = 1", "devices[0].zzz: unknown key, known are name, slots, "),
        (BATCHING + "bukets = [8]", "models[0].versions[0].batching.bukets: unknown key, did you"),
        ('[server]\nport = "x"', "server.port: must be an integer from 0 to 65535, got 'x'"),
        ("[server]\nport = 65536", "server.port: must be an integer from 0 to 65535, got 65536"),
        ("[server]\ntimeout_s = 0", "server.timeout_s: must be a number over 0, got 0"),
        ("[server]\ntimeout_s = inf", "server.timeout_s: must be a finite number, got inf"),
        ("[server]\ntimeout_s = nan", "server.timeout_s: must be a number over 0, got nan"),
        ("models = 3", "models: must be a list, each a table, got 3"),
        ("models = [3]", "models[0]: must be a list, each a table, got 3"),
        ("[[models]]", "models[0].name: is required. Public name"),
        ('[[models]]\nname = "a b"', "models[0].name: must be a string without spaces"),
        ("[[devices]]\nslots = 1.5", "devices[0].slots: must be an integer of at least 1 or"),
        ("[[devices]]\nslots = true", "devices[0].slots: must be an integer of at least 1 or"),
        (VERSION + "dtype = 'int8'", 'models[0].versions[0].dtype: must be one of "auto", '),
        (VERSION + "sha256 = 'ab'", "models[0].versions[0].sha256: must be 64 hexadecimal digits"),
        (VERSION + "prompts = {q = 1}", "models[0].versions[0].prompts: must be a table of"),
        (BATCHING + "buckets = [0]", "models[0].versions[0].batching.buckets: must be a list, "),
    ],
)
def test_a_wrong_value_is_told_with_its_path(write: Path, text: str, message: str) -> None:
    """A value of the wrong type or out of bounds names its field, the rule and what was given."""
    assert mistake(write, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[server]\ntimeout_s = 9\nmax_timeout_s = 8",
            "server.timeout_s: must be at most server.max_timeout_s (8), got 9",
        ),
        ("[[devices]]\nname = 'gpu'", "devices[0].name: must be cpu, cuda or cuda:N, got 'gpu'"),
        (
            "[[devices]]\n[[devices]]",
            "devices[1].name: must be unique, got 'cpu' as in devices[0].name",
        ),
        (
            '[[models]]\nname = "a"\nsource = "s"\n[[models]]\nname = "b"\nsource = "s"\n'
            'aliases = ["c", "a"]',
            "models[1].aliases[1]: must be unique, got 'a' as in models[0].name",
        ),
        ('[[models]]\nname = "a"', "models[0]: must have either source or versions, got neither"),
        (
            '[[models]]\nname = "a"\nsource = "s"\n[[models.versions]]',
            "models[0]: must have either source or versions, got both",
        ),
        (
            VERSION + "[[models.versions]]",
            "models[0].versions: must be one version for now, got 2",
        ),
        (VERSION + "device = 'gpu'", "models[0].versions[0].device: must be auto, cpu, cuda or"),
        (
            BATCHING + "buckets = [64, 32]",
            "models[0].versions[0].batching.buckets: must ascend, got [64, 32]",
        ),
        (BATCHING + "buckets = [8, 8]", "models[0].versions[0].batching.buckets: must ascend"),
        (BATCHING + "buckets = []", "models[0].versions[0].batching.buckets: must have an edge"),
        (
            BATCHING + "buckets = [100000]",
            "models[0].versions[0].batching.buckets: must be at most 32768 tokens, got 100000",
        ),
        (
            VERSION + "max_length = 64\n[models.versions.batching]\nbuckets = [32, 128]",
            "models[0].versions[0].batching.buckets: must be at most max_length (64), got 128",
        ),
        (
            BATCHING + "max_queue_sequences = 100",
            "models[0].versions[0].batching.max_queue_sequences: must be at least "
            "server.max_inputs (2048), got 100",
        ),
        (
            BATCHING + "max_queue_tokens = 100",
            "models[0].versions[0].batching.max_queue_tokens: must be at least ",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    write: Path, text: str, message: str
) -> None:
    """What is wrong only beside another field names the first and quotes the second."""
    assert mistake(write, text).startswith(message)


@pytest.mark.parametrize("text", ["[server\n", "port = ", "\x00"])
def test_a_file_that_is_not_toml_is_named(write: Path, text: str) -> None:
    """Broken syntax is told with the file and the place."""
    assert mistake(write, text).startswith(f"{write}: not valid TOML: ")


def test_a_missing_file_is_named(write: Path) -> None:
    """A file that is not there is told with its path."""
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be read: No such file"):
        load(write)


def test_a_flag_out_of_bounds_is_told_with_the_field_it_sets() -> None:
    """Flags are held to the same limits as the file."""
    with pytest.raises(ConfigError, match=r"^models\[0\].versions\[0\].dtype: must be one of"):
        load(None, Overrides(dtype="int8"))


def test_an_empty_flag_is_no_flag() -> None:
    """Deployments set variables they have no value for; such a flag changes nothing."""
    assert load(None, Overrides(model="", host="", device="")) == load()


def test_the_effective_configuration_reads_back(write: Path) -> None:
    """What `check` prints is a file that means the same."""
    write.write_text(
        '[server]\nhost = "::"\n[[devices]]\nslots = 3\n[[models]]\nname = "m"\naliases = ["a"]\n'
        '[[models.versions]]\nsource = "C:\\\\x\\u007f\\"é"\nmatryoshka_dims = [64, 128]\n'
        'prompts = { query = "q: ", "my doc" = "d:\\n" }\n[models.versions.batching]\n'
        "buckets = [16, 32]\nmax_batch_delay_ms = 1.5"
    )
    config = load(write)
    write.write_text(msgspec.toml.encode(config).decode())

    assert load(write) == config
