"""`torchelastic checkpoint ls | show | verify | prune | convert`: looking after checkpoints from a shell.

The parser is in `main.py`. Every kind of checkpoint that this package writes is a `Format` (`format.py`); those of
others, which only `convert` reads and writes, are in `foreign/`. See docs/checkpoint.md.
"""
