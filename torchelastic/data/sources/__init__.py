"""Sources of streams: text, JSON Lines, parquet, tar shards and other libraries' datasets, and what changes them.

A source is called as `source(shard, num_shards, position)` and returns an iterator over the samples of one logical
shard, from a position on. `shard` is 0 to `num_shards` - 1; the shards are fixed for the whole run whatever its world
size, and together they have each sample of the data once. `position` is 0 at the beginning; else it is what
`state_dict()` of an earlier iterator of this shard returned: the place behind the newest sample that was drawn, as
plain data. An iterator without `state_dict()`, a generator function's for example, has the number of samples drawn
since the beginning for its position. Nothing else is asked of a source that you write yourself; see
`torchelastic.data.Source`.
"""
