"""ML Flashpoint: checkpoints of torch.distributed.checkpoint on tmpfs, with a replica of each shard on another host.

Users import `torchelastic.checkpoint.memory`. A save: `writer.py` (what DCP calls), `saver.py` (whether there is room,
and what follows), `staged_items.py` (copies this rank's share into a slot), `container.py` (a folder of this job on
tmpfs, where shards and at last the commit appear). A load: `reader.py`, which asks `loader.py` for the newest
checkpoint that the hosts can put together. `object_manager.py` knows the containers of this process, by name for hosts
that ask.
"""
