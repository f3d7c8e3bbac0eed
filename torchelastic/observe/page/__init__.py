"""The live page: a run in a browser, served by an agent; see docs/observing.md, and docs/security.md for its access.

Status comes from etcd, with this host's own (`source.py`), is read once for all while somebody watches (`feed.py`),
and goes out from a thread with an event loop of its own (`page_server.py`). Imports no torch and needs no internet.
"""
