"""The yardstick of `bench pipeline`: one typed Litestar handler that answers a made-up vector.

Run as `python -m embedsvc.bench.bare DIM`; prints where it listens, ends with SIGTERM. It decodes
the body and answers as many bytes as the service does, and does nothing else.
"""

from __future__ import annotations

import base64
import socket
import sys

import msgspec
import uvicorn
import uvloop
from litestar import Litestar, Response, post
from msgspec import Struct

HOST = "127.0.0.1"


class Body(Struct):
    """A request, decoded and not looked at."""

    input: str | list[str]
    model: str
    encoding_format: str = "float"


def bare_app(dim: int) -> Litestar:
    """Return an app with the one handler."""
    vector = base64.b64encode(bytes(4 * dim)).decode()
    reply = msgspec.json.encode(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": vector}],
            "model": "bare",
            "usage": {"prompt_tokens": 1, "total_tokens": 1},
        }
    )

    @post("/v1/embeddings", status_code=200)
    async def embeddings(data: Body) -> Response[bytes]:
        return Response(reply, media_type="application/json")

    return Litestar([embeddings], openapi_config=None)


class _Announcing(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        sys.stdout.write(f"ready on http://{host}:{port}\n\n")
        sys.stdout.flush()


def main() -> None:
    """Serve on a free port until SIGTERM."""
    app = bare_app(int(sys.argv[1]))
    config = uvicorn.Config(app, HOST, 0, http="httptools", log_level="warning", access_log=False)
    uvloop.run(_Announcing(config).serve())


if __name__ == "__main__":
    main()
