"""`python -m benchmarks.storm`: one SIGKILL every few steps, what it costs, and that nothing is lost by it."""
