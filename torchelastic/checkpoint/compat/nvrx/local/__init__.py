"""Checkpoints on the hosts that train, and copies of them on other hosts: `torchelastic.checkpoint.local`.

A save: `base_manager.py` (what every manager does), `local_manager.py` (ours), `host_folder.py` (what lies on this
host), `shard_write.py` (one shard). `strategies.py` and `group_wrapper.py` say which ranks hold each other's copies.
"""
