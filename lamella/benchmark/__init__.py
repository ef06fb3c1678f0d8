"""Offline benchmarks: what to send (datasets) and what came of it (throughput)."""
