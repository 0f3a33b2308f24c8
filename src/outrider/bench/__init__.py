"""Benchmarks: plain and speculative decoding, other engines side by side in one run, and load on a server."""
