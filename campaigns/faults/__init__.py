"""Campaigns of faults: each is one command that plants faults, runs bertopt, and prints one line a case."""
