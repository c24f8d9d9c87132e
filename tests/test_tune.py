"""`embedsvc tune`, from a server's metrics or a file to settings, a report and a table."""

from __future__ import annotations

import asyncio
import html
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from embedsvc.calls import EmbedCall
from embedsvc.config import Config
from embedsvc.configfile import load
from embedsvc.engine.calibrate import Calibration, Errors
from embedsvc.engine.cost import CostModel
from embedsvc.loading import load as load_model
from embedsvc.models.cache import Cache
from embedsvc.recommendation import Recommendation, Targets, measured_divisions, recommend
from embedsvc.tuning.predict import Point, Series
from embedsvc.tuning.sources import Source
from tests.http_real import NAME, RealService, config_of
from tests.http_wire import serving
from tests.terminal import embedsvc

# Loads a server and the tuner, measures, and simulates; on a busy machine more than the usual 20 s.
pytestmark = pytest.mark.timeout(60)

QUICK = ("--simulated", "150", "--log-level", "error")
MEASURED = Series("8 at 2 ms", [Point(77.7, 71.25, 60.0, 3.5, 0.25, 0.0423, 0.331, None, 5, 0)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and one cache, so that costs are measured once."""
    folder = tmp_path_factory.mktemp("tune")
    lengths = [f"{4 + k % 60},{1 + k % 7}" for k in range(120)]
    (folder / "lengths.csv").write_text("length,count\n" + "\n".join(lengths))
    (folder / "points.json").write_bytes(msgspec.json.encode([MEASURED]))
    (folder / "config.toml").write_text(
        f"""
        [server]
        port = 8123
        cache_dir = "{folder}/cache"

        [[devices]]
        name = "cuda"
        slots = 3

        [[models]]
        name = "m"
        aliases = ["text-embedding-3-small"]

        [[models.versions]]
        backend = "hash"
        max_length = 128
        prompts = {{ query = "query: " }}

        [models.versions.batching]
        buckets = [128]
        max_batch_delay_ms = 20
        max_queue_sequences = 9000

        [[models]]
        name = "other"
        source = "org/other"
        """
    )
    give_costs(load(folder / "config.toml"))
    return folder


def give_costs(config: Config) -> None:
    """Replace what was measured of the weightless model by a MiniLM on one core in bfloat16."""
    version, cache = config.models[0].versions[0], Cache(config.server.cache_dir)
    of_model, _, model = load_model(version, "models[0]", cache)
    measured_divisions(config, of_model, model, cache)
    for path in cache.directory.glob("*.json"):
        stored = json.loads(path.read_bytes())
        if stored["key"]["kind"] == "calibration":
            cost = CostModel(3e-3, 1e-4, 52e-6, 4e-8)
            stored["value"] = msgspec.to_builtins(Calibration(cost, 512, Errors(0.06, 0.1)))
            path.write_text(json.dumps(stored))


@dataclass(frozen=True)
class Run:
    """What one run gave."""

    text: str
    toml: str
    html: str


def tune(folder: Path, name: str) -> Run:
    """Run the command on the folder's inputs."""
    outputs = ("--output", folder / f"{name}.toml", "--report", folder / f"{name}.html")
    status, out, err = embedsvc(
        "tune", folder / "config.toml", "--lengths", folder / "lengths.csv", "--slo-ms", "50",
        "--points", folder / "points.json", *outputs, *QUICK,
    )  # fmt: skip
    assert (status, err) == (0, "")
    return Run(out, *((folder / f"{name}.{kind}").read_text() for kind in ("toml", "html")))


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """One run, looked at by several tests."""
    return tune(folder, "one")


def test_the_file_loads_and_keeps_what_the_user_set(folder: Path, run: Run) -> None:
    """Only searched settings differ from the user's file; `check` takes it."""
    status, _, err = embedsvc("check", folder / "one.toml", "--config-only", "--log-level", "error")
    before, after = load(folder / "config.toml"), load(folder / "one.toml")
    was, now = (config.models[0].versions[0].batching for config in (before, after))

    assert (status, err) == (0, "")
    assert (now.buckets, now.max_batch_delay_ms) == ("auto", 0)
    assert now.max_queue_sequences == was.max_queue_sequences == 9000
    assert before.models[1] == after.models[1]
    assert (before.server, before.devices) == (after.server, after.devices)
    assert after.models[0].versions[0].prompts == {"query": "query: "}


def test_what_changes_has_its_reason_above_it(run: Run) -> None:
    """Each changed field is told with its former value and a figure; the others are not."""
    lines = [line.strip() for line in run.toml.splitlines()]

    above = lines[lines.index("max_batch_delay_ms = 0.0") - 1]
    assert re.match(r"# was 20; .* texts/s .* with 20$", above)
    assert lines[lines.index('buckets = "auto"') - 1].startswith("# was [128]; ")
    assert not lines[lines.index("max_queue_sequences = 9000") - 1].startswith("# was")


def test_the_report_loads_nothing(run: Run) -> None:
    """Law: no address, script, import or link is in the page."""
    assert "http://" not in run.html.replace("http://www.w3.org/", "")
    assert "https://" not in run.html
    for tag in ("<script", "<link", "<img", "<iframe", "@import", "url("):
        assert tag not in run.html


def test_the_report_has_the_figures_of_the_text(run: Run) -> None:
    """Every cell of the page's tables is in the terminal's, as often."""
    cells = [html.unescape(c) for c in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", run.html)]
    shown = [word for line in run.text.splitlines() for word in re.split(r"  +", line.strip())]

    assert len(cells) > 100
    assert Counter(filter(None, cells)) <= Counter(shown)


def test_the_report_shows_everything(run: Run) -> None:
    """Three charts with names and units of their axes, facts, legend, measured points, the file."""
    assert run.html.count('<svg viewBox="0 0 860') == 3
    for words in (
        "rate, texts per second", "latency, ms", "length, tokens", "texts, %", "rows of a batch",
        "padded length, tokens", "present, p99", "proposed, p50", "present: saturation",
        "8 at 2 ms: measured", "71.25", "prefers-color-scheme", "<h1>embedsvc tune: m</h1>",
        "hash", " cores", "max_queue_sequences = 9000",
    ):  # fmt: skip
        assert words in run.html, words


def test_equal_inputs_give_equal_outputs(folder: Path, run: Run) -> None:
    """Law: text, file and report are the same every time."""
    assert tune(folder, "two") == run


async def test_the_lengths_of_a_live_server_come_back(tmp_path: Path) -> None:
    """What a server embedded is what is tuned for, read from its `/metrics`; buckets are fixed."""
    service = RealService(auto_config(tmp_path))
    async with serving(service) as site:
        texts = ["word " * n for n in (3, 9, 30) for _ in range(50)]
        lengths = (await service.embed(EmbedCall(NAME, texts))).prompt_tokens
        host, port = site.listener.getsockname()
        found = await asyncio.to_thread(from_server, tmp_path, f"{host}:{port}")

    counts = found.found.ground.lengths
    held = {range(1, 9): 50, range(9, 17): 50, range(25, 41): 50}
    assert {k: round(counts[k.start : k.stop].sum()) for k in held} == held
    assert counts.sum() == pytest.approx(150)
    assert float(counts @ np.arange(len(counts))) == pytest.approx(lengths, rel=0.2)


def auto_config(cache: Path) -> Config:
    """Return a weightless model whose device is divided as the server likes."""
    return replace(config_of(cache), devices=[])


def from_server(cache: Path, address: str) -> Recommendation:
    targets = Targets(0.25, None, 0.001, n_texts=150)
    return recommend(auto_config(cache), Source(from_metrics=address), targets)


@pytest.mark.parametrize("jsonl", [True, False])
def test_texts_are_tokenized_as_served(folder: Path, jsonl: bool) -> None:
    """JSONL rows and plain lines give the same lengths, special tokens included, long ones cut."""
    texts = ["one two three"] * 90 + ["word " * 500] * 30
    path = folder / "texts"
    lines = [msgspec.json.encode({"text": t}).decode() for t in texts] if jsonl else texts
    path.write_text("\n".join(lines))

    targets = Targets(0.25, None, 0.001, n_texts=150)
    found = recommend(load(folder / "config.toml"), Source(texts=path), targets).found

    assert {n: found.ground.lengths[n] for n in (5, 128)} == {5: 90, 128: 30}


# --- mistakes -------------------------------------------------------------------------------------


@contextmanager
def answering(status: int, body: str) -> Iterator[str]:
    """Run a server that gives one answer to everything; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # likewise
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (404, "", "answers 404 Not Found; is it embedsvc?"),
        (200, "up 1\n", "has no embedsvc_text_tokens"),
        (200, "<html>", "is not in Prometheus' text format"),
    ],
)
def test_other_servers_are_told(status: int, body: str, complaint: str) -> None:
    """One line with the address and what is wrong there."""
    with answering(status, body) as url:
        code, out, err = embedsvc("tune", "--backend", "hash", "--from-metrics", url)

    assert (code, out) == (1, "")
    assert err.startswith(f"embedsvc: --from-metrics: {url} {complaint}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give one of --from-metrics, --lengths, --texts, got 0 of them"),
        (
            ["--lengths", "a", "--texts", "b"],
            "give one of --from-metrics, --lengths, --texts, got 2",
        ),
        (["--lengths", "absent"], "--lengths: absent cannot be read: No such file"),
        (["--texts", "absent"], "--texts: absent cannot be read: No such file"),
        (["--lengths", "empty"], "--lengths: empty has 0 texts; at least 100"),
        (["--lengths", "words"], "--lengths: words line 2 must be a number of tokens"),
        (["--texts", "words"], "--texts: words has 2 texts; at least 100"),
        (["--texts", "rows"], '--texts: rows must have rows of {"text": …}'),
        (["--lengths", "binary"], "--lengths: binary is not text in UTF-8"),
        (["--lengths", "fine", "--points", "words"], "--points: words must be what"),
        (["--from-metrics", "127.0.0.1:1"], "--from-metrics: 127.0.0.1:1 does not answer"),
        (["--from-metrics", "ftp://x"], "--from-metrics: ftp://x is no address, such as http://"),
        (["--from-metrics", "http://x:y/"], "--from-metrics: http://x:y/ does not answer"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    """The line names the flag, what was given, and what to do."""
    monkeypatch.chdir(tmp_path)
    files = {"empty": "", "words": "5 tokens\nmore\n", "rows": '{"text": 3}', "fine": "5,100"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    code, out, err = embedsvc("tune", "--backend", "hash", *arguments, HOME=str(tmp_path))

    assert (code, out) == (1, "")
    assert err.startswith(f"embedsvc: {complaint}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--output", "--report"])
def test_a_file_that_cannot_be_written_is_told_at_once(folder: Path, flag: str) -> None:
    """Before anything is measured or simulated."""
    code, out, err = embedsvc("tune", "--backend", "hash", flag, folder / "absent" / "file")

    assert (code, out) == (1, "")
    assert err.startswith(f"embedsvc: {flag}: {folder}/absent/file cannot be written: there is no")
