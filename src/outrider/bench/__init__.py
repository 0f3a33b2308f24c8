"""Benchmarks: plain and speculative decoding, other engines side by side in one run, and load on a server."""

from outrider.bench.commands import bench_app
from outrider.bench.overhead import overhead_command
from outrider.bench.serve import serve_bench
from outrider.bench.soak import soak_command

bench_app.command("serve")(serve_bench)
bench_app.command("soak")(soak_command)
bench_app.command("overhead")(overhead_command)

__all__ = ["bench_app"]
