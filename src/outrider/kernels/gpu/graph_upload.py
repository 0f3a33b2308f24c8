"""Graphs sent to the device when they are recorded: otherwise the first replay of each does it, and takes 0.4 ms longer
(the passes of an 8B; as long as half a round of a small model, which would mislead whoever times rounds)."""

import ctypes
import functools
from collections.abc import Callable

import torch


def upload_graph(graph: torch.cuda.CUDAGraph) -> None:
    """`graph` has been recorded, and will be replayed on the current stream. Where torch does not tell the driver's
    name of a graph, its first replay sends it."""
    named = getattr(graph, "raw_cuda_graph_exec", None)
    if named is None:
        return
    status = _driver_call()(named(), torch.cuda.current_stream().cuda_stream)
    if status:
        raise RuntimeError(f"the driver could not send a recorded round to the GPU (cuGraphUpload: error {status})")


@functools.cache
def _driver_call() -> Callable[[int, int], int]:
    function = ctypes.CDLL("libcuda.so.1").cuGraphUpload  # torch has no name for it
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int
    return function
