"""The versions: of this package, in the one place that packaging reads, and of torch, for which it was written."""

__version__ = "1.0.0a1"

#: The oldest torch that this package works with.
OLDEST_TORCH = "2.6"
#: The newest torch with which its tests were run; a newer one may lack private names (`torchelastic.torch_internals`).
NEWEST_TESTED_TORCH = "2.15.0"
