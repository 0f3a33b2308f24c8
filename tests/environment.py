"""What tests are surrounded by: Triton interpreted where there is no GPU, one thread, and time that is made up."""

import functools
import os
from contextlib import suppress

import torch

with suppress(ImportError):
    from httpx._transports import default as transport

    # certificates are read once for all clients: they take longer than what is asked here, and nobody shows any
    transport.create_ssl_context = functools.cache(transport.create_ssl_context)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: tests run its kernels on the CPU
    with suppress(ImportError):
        from interpreting import speed_up

        speed_up()

from made_up_time import seconds_of

from outrider.engine.stopwatch import Stopwatch

torch.set_num_threads(1)  # tiny models; the suite runs on several processes
# Drafters draft as much as is worth it, as they do for users; but what is tested must not depend on how fast a machine
# is. Tests that count drafts ask for a fixed depth: {"adaptive": false}.
MEASURED_LAP = Stopwatch.lap
Stopwatch.lap = lambda self, flight, end: seconds_of(flight.shape)  # type: ignore[method-assign]
