"""Formats of others, for `convert`: each module has `is_one`, `read` and `write`."""
