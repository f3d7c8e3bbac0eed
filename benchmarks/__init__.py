"""Measurements, each a ratio to a floor or a peer in one run, printed as one JSON line. Never part of the tests."""
