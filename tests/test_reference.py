"""docs/reference.md is made from the code."""

from __future__ import annotations

from pathlib import Path

from embedsvc.config import BatchingConfig, DeviceConfig, ModelConfig, ServerConfig, VersionConfig
from embedsvc.fields import fields
from embedsvc.reference import render

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"


def test_the_page_is_current() -> None:
    """The committed page is what the code makes: `make reference` where it is not."""
    assert PAGE.read_text() == render()


def test_every_field_says_how_to_choose_a_value() -> None:
    """No key of the configuration is without a description."""
    sections = (ServerConfig, DeviceConfig, ModelConfig, VersionConfig, BatchingConfig)
    silent = [
        f"{section.__name__}.{field.name}"
        for section in sections
        for field in fields(section)
        if not field.description and field.section is None
    ]

    assert silent == []


def test_every_metric_and_error_is_on_the_page() -> None:
    """The tables hold what dashboards and clients rely on."""
    page = render()

    assert "| `embedsvc_tokens_total` | counter | model, version, kind |" in page
    assert "| 429 | rate_limit_error | rate_limit_exceeded | overloaded |" in page
