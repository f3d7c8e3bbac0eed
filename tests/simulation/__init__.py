"""Whole runs in simulated time: the production decisions, simulated stores, hosts, workers and faults, from a seed."""
