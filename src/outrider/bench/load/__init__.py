"""Load on engines and servers: one request, many, a crowd for minutes, attacks, traffic by number of clients."""
