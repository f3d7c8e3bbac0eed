"""Checkpoints in several tiers, saved by all ranks beside the training; see `tiered_manager.TieredCheckpointManager`.

After the same committed step each rank copies its share into a slot of warm memory; that alone stops the training.
One thread per process does the rest: checksums, then for each tier that takes part (rank 0 says which) put, replicas,
and a note to rank 0, in the store of the round. When rank 0 has the notes of all, it commits. A rank that could not
store says why, and nobody publishes; one that is silent is waited for, named, and the save is given up. After the
first save no file is created and no memory allocated on the training thread.

A restore, of every kind of checkpoint: `restorer.py` takes the newest that all ranks can read, and skips damaged
copies. Where the copies are: `tiered_restore.py` knows tiers, `group_folders.py` folders of which each host has one.
"""
