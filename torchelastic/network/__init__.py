"""This host's networks: which interfaces there are, which one is meant, and at which address the others reach it."""
