"""`outrider serve`: the engine behind OpenAI's HTTP interface. Needs the `serve` extra; nothing else does."""
