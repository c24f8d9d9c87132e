"""API keys: mistakes in their file, who is let in where, and whom a request counts for."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import httpx
import pytest

from embedsvc.cli import main
from embedsvc.config import Config, ServerConfig
from embedsvc.engine.sequence import NO_KEY, Key
from embedsvc.errors import ConfigError, InvalidKey, MissingKey
from embedsvc.keys import Keys, read_keys
from embedsvc.service import Service
from tests.http_fakes import URL, FakeService, client_of, error_of

SECRET = "a-very-secret-key"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()
OTHER_DIGEST = hashlib.sha256(b"another").hexdigest()
TEAM = Key("team-a", 2.5)
ENTRY = f'[[keys]]\nname = "team-a"\nsha256 = "{DIGEST}"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a file of keys to be written."""
    return tmp_path / "keys.toml"


# --- the file ------------------------------------------------------------------------------------


def test_a_key_counts_for_its_name_and_weight(file: Path) -> None:
    """The SHA-256 of what is presented decides; capital digits are the same."""
    file.write_text(f'{ENTRY}weight = 2.5\n[[keys]]\nname = "b"\nsha256 = "{OTHER_DIGEST.upper()}"')

    keys = read_keys(str(file))

    assert keys.of(SECRET.encode()) == TEAM
    assert keys.of(b"another") == Key("b", 1.0)
    for nobodys in (b"wrong", SECRET.encode()[:-1], DIGEST.encode(), b"\xff\x00"):
        with pytest.raises(InvalidKey):
            keys.of(nobodys)
    for nothing in (None, b""):
        with pytest.raises(MissingKey):
            keys.of(nothing)


def test_without_a_file_everyone_is_let_in() -> None:
    """Clients that send some key, as OpenAI's must, are welcome too."""
    keys = read_keys("")

    assert keys.of(None) is keys.of(b"unused") is NO_KEY


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "keys: is required. Those who are let in."),
        ("keys = []", "keys: must have a key, got []"),
        ("[[key]]", "key: unknown key, did you mean keys?"),
        (f"[[keys]]\nsha256 = '{DIGEST}'", "keys[0].name: is required. Whose it is"),
        ("[[keys]]\nname = 'a'", "keys[0].sha256: is required. SHA-256 of the key: `printf"),
        (ENTRY + "weight = 0", "keys[0].weight: must be a number over 0 and at most 100, got 0"),
        (ENTRY + "weight = 101", "keys[0].weight: must be a number over 0 and at most 100, got"),
        (ENTRY + "weight = nan", "keys[0].weight: must be a number over 0 and at most 100, got"),
        (ENTRY + "wieght = 1", "keys[0].wieght: unknown key, did you mean weight?"),
        (ENTRY + ENTRY, "keys[1].name: must be unique, got 'team-a' as in keys[0].name"),
        (
            f'{ENTRY}[[keys]]\nname = "b"\nsha256 = "{DIGEST}"',
            "keys[1].sha256: must be unique, is the same as keys[0].sha256",
        ),
        ("[[keys", "not valid TOML: "),
    ],
)
def test_a_mistake_is_told_with_its_path(file: Path, text: str, message: str) -> None:
    """The setting, the file, the field, the rule and what was given."""
    file.write_text(text)

    with pytest.raises(ConfigError) as refused:
        read_keys(str(file))

    assert str(refused.value).startswith(f"server.keys_file: {file}: {message}")


@pytest.mark.parametrize("value", [f'"{SECRET}"', f'["{SECRET}"]', f'{{ a = "{SECRET}" }}'])
def test_a_key_in_the_place_of_its_digest_is_not_repeated(file: Path, value: str) -> None:
    """What may be a secret is in no message."""
    file.write_text(f'[[keys]]\nname = "a"\nsha256 = {value}')

    with pytest.raises(ConfigError) as refused:
        read_keys(str(file))

    assert str(refused.value).endswith("keys[0].sha256: must be 64 hexadecimal digits")


def test_a_missing_file_stops_the_start_and_the_check(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is let in by mistake."""
    with pytest.raises(ConfigError, match=r"keys\.toml cannot be read: No such file"):
        Service(Config(server=ServerConfig(keys_file=str(file))))

    config = file.with_name("config.toml")
    config.write_text(f'[server]\nkeys_file = "{file}"')
    with pytest.raises(SystemExit):
        main(["check", str(config), "--config-only"], standalone_mode=False)
    assert "server.keys_file" in capsys.readouterr().err


# --- over HTTP -----------------------------------------------------------------------------------

ROUTES = [
    ("POST", URL),
    ("POST", "/embeddings"),
    ("POST", "/v1/embeddings/"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/model"),
    ("GET", "/info"),
]


@pytest.fixture
def guarded(file: Path) -> FakeService:
    """Return a service that lets one key in."""
    service = FakeService()
    service.keys = Keys({bytes.fromhex(DIGEST): TEAM})
    return service


async def ask(
    service: FakeService, method: str, path: str, headers: dict[str, str]
) -> httpx.Response:
    async with client_of(service) as client:
        body = {"json": {"input": "a"}} if method == "POST" else {}
        return await client.request(method, path, headers=headers, **body)  # type: ignore[arg-type]  # either


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_key_is_asked_for(guarded: FakeService, method: str, path: str) -> None:
    """Wherever something is computed or told of: 401 in OpenAI's words, and how to do better."""
    without = await ask(guarded, method, path, {})
    wrong = await ask(guarded, method, path, {"authorization": "Bearer sk-wrong"})
    right = await ask(guarded, method, path, {"authorization": f"Bearer {SECRET}"})

    assert (without.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
    assert without.headers["www-authenticate"] == "Bearer"
    assert error_of(without)["code"] is None
    assert error_of(wrong) == {
        "message": "Incorrect API key provided. Ask for one where this server is run.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/health", "/metrics"])
async def test_probes_and_scrapers_need_no_key(guarded: FakeService, path: str) -> None:
    """They have none."""
    assert (await ask(guarded, "GET", path, {})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET} "},
        {"api-key": SECRET},
        {"api-key": SECRET, "authorization": "Basic eDp5"},
    ],
)
async def test_a_request_counts_for_its_key(guarded: FakeService, headers: dict[str, str]) -> None:
    """As OpenAI's clients send it, and Azure's, and behind a proxy with a login of its own."""
    assert (await ask(guarded, "POST", URL, headers)).status_code == 200
    assert [call.key for call in guarded.calls] == [TEAM]


async def test_keys_come_before_readiness(guarded: FakeService) -> None:
    """A stranger learns nothing of the state of a server, and is not told to come back."""
    guarded.state = "loading"

    assert (await ask(guarded, "POST", URL, {})).status_code == 401


async def test_the_log_has_names_and_no_keys(
    guarded: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose request was slow or failed is told by the name."""
    caplog.set_level(logging.DEBUG)
    guarded.error = RuntimeError("broken")
    await ask(guarded, "POST", URL, {"api-key": SECRET})
    await ask(guarded, "POST", URL, {"api-key": SECRET + "?"})

    assert "key='team-a'" in caplog.text
    assert SECRET not in caplog.text
