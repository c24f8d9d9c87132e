"""The command line, run in the test's process."""

from __future__ import annotations

import logging
from pathlib import Path

from click.testing import CliRunner

from embedsvc.cli import main


def embedsvc(*arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    """Run the command; return its exit status, stdout and stderr. The log level stays as it was."""
    try:
        done = CliRunner().invoke(main, [str(a) for a in arguments], env=environment)
    finally:
        logging.getLogger("embedsvc").setLevel(logging.NOTSET)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr
