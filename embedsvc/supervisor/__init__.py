"""Several HTTP processes on one address, kept alive by one that serves nothing itself."""
