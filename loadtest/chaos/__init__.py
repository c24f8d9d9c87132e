"""Chaos: random load while processes are killed, stopped and poisoned; `python -m loadtest.chaos`.

`plan` decides what happens, `client` and `faults` do it, `checker` judges it, `report` shows it.
"""
