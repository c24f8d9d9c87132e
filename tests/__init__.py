"""The tests. How long an example takes decides nothing: machines are busy now and then."""

from hypothesis import settings

settings.register_profile("embedsvc", deadline=None)
settings.load_profile("embedsvc")
