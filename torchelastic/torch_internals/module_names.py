"""What torch's wrappers put into the names of parameters. Imports no torch."""

from __future__ import annotations

#: Of a compiled module: the attribute in which it holds the user's.
COMPILED = "_orig_mod"
#: Of a module with activation checkpointing.
CHECKPOINTED = "_checkpoint_wrapped_module"
