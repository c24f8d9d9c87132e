"""Tuning: what lengths arrive, which bucket edges suit them, and what a configuration would do."""
