"""A training job under faults: the program of its workers, and the verbs of whoever watches it."""
