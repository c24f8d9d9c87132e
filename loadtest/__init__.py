"""Measurements against a running server; run from the repository's root, nothing is installed."""
