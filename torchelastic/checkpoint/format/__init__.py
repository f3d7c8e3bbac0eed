"""One format under every checkpoint: shards, written once and checked whenever it is read.

A shard is a file of aligned raw tensor bytes behind a small header (`header.py`). A state becomes plain values and
named tensors (`tree.py`, `tensor_parts.py`); a tensor may be split over ranks (`regions.py`) and is put together again
by whatever number of ranks reads it (`loading.py`).
"""
