"""Asks a server on this machine whether it is ready; imports nothing that takes long."""

from __future__ import annotations

import http.client
import json

from embedsvc.config import ServerConfig

# Less than the 5 s that the image's health check may take.
TIMEOUT_S = 4.0
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def probe(config: ServerConfig) -> tuple[bool, str]:
    """Ask for `/health/ready` and return whether it is, and the state or what went wrong.

    Proxies of the environment are not used: this is for the server of the same configuration.
    """
    host = _ANY_ADDRESS.get(config.host, config.host)
    connection = http.client.HTTPConnection(host, config.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/ready")
        reply = connection.getresponse()
        return reply.status == http.client.OK, str(json.loads(reply.read())["state"])
    except OSError as error:
        return False, f"no answer from {host}:{config.port}: {error}"
    except (http.client.HTTPException, ValueError, KeyError, TypeError):
        return False, f"what answers on {host}:{config.port} is not embedsvc"
    finally:
        connection.close()
