"""A Hub on this machine: the three routes that a download uses, and a log of what was asked."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = hashlib.sha1(b"a commit").hexdigest()


@dataclass
class FakeHub:
    """Repositories by name, each a map from file names to contents, all at one commit."""

    repositories: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    endpoint: str = ""

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serve until the block ends."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a path."""
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        files = self.repositories.get(repo)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        route, revision, *name = parts[4 if api else 2 :]
        if revision not in ("main", "v1.0", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if route == "revision":
            return 200, {}, json.dumps({"id": repo, "sha": COMMIT, "siblings": []}).encode()
        if route == "tree":
            tree = [{"type": "file", "path": n, **_sizes(c)} for n, c in files.items()]
            return 200, {}, json.dumps(tree).encode()
        content = files["/".join(name)]
        self.fetched.append("/".join(name))
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{_sizes(content)["oid"]}"'}, content

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.tokens.add(self.headers.get("Authorization"))
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815  # the name http.server looks for

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        return Handler


def _sizes(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def resolve_elsewhere(sources: list[str], environment: dict[str, str]) -> list[dict[str, str]]:
    """Resolve sources in a process of its own: the Hub's client reads its settings once.

    Returns:
        For each source `path` and `revision`, or `error`; and the log of the first in `log`.
    """
    program = (
        "import json, logging, sys\n"
        "from embedsvc.errors import ModelError\n"
        "from embedsvc.models.source import resolve\n"
        "logging.basicConfig(level='INFO', stream=sys.stderr)\n"
        "def one(source):\n"
        "    try:\n"
        "        folder = resolve(source)\n"
        "    except ModelError as error:\n"
        "        return {'error': str(error)}\n"
        "    return {'path': str(folder.path), 'revision': folder.revision}\n"
        "print(json.dumps([one(source) for source in sys.argv[1:]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *sources],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    results: list[dict[str, str]] = json.loads(done.stdout)
    return [{**result, "log": done.stderr} for result in results]
