"""torchelastic 0.1: `FileSystemCheckpointManager`, one stream of bytes that one rank writes and one rank reads.

It knows no ranks and calls no collective: the train loop calls `save` on the one rank that saves, and `load_latest` on
the one that restores. Files are written and fsynced in a hidden folder (`staging.py`), which one rename publishes; ids
only grow, and nothing is overwritten. A stream is opened after its size and SHA-256 were compared (`verification.py`);
what `state.load` raises on intact bytes propagates unchanged. A hidden folder is removed when its writer is a dead
process of this host, or nothing in it has changed for a day. Of a folder of 0.1, which has no manifest, the file
`default` has to be one that `torch.load(weights_only=True)` can read.
"""
