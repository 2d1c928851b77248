"""Checks on a session: parity, latency, quality. Checks know no pass and no runtime."""
