"""`python -m benchmarks.recovery`: what a killed worker costs, beside floors and peers in the same run."""
