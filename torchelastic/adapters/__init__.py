"""This library from other training frameworks: each module imports its own framework only.

All of them save into the memory of the hosts (`memory_tier.py`; `values.py` for what is no tensor), between the durable
checkpoints of the framework, and choose which one a run goes on from.
"""
