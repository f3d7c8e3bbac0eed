"""`torchelastic checkpoint ls | show | verify | prune | convert`: looking after checkpoints from a shell.

The parser is in `main.py`; its commands are views of `StoredSaves` (`stored_saves.py`): what is stored in one place, a
path or a URL. Every kind of checkpoint that this package writes is a `Format` (`format.py`); those of others, which
only `convert` reads and writes, are in `foreign/`. See docs/checkpoint.md.
"""
