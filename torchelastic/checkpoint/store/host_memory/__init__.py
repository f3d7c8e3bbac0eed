"""The memory of this host as a place for checkpoints: whether there is room, and what dead jobs have left."""
