"""`python -m benchmarks.sharded`: what it costs that a sharded model survives a killed worker."""
