"""Benchmarks: plain and speculative decoding, and other engines, side by side in one run."""

from outrider.bench.commands import bench_app

__all__ = ["bench_app"]
