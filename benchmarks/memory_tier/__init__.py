"""What checkpoints in memory cost: saves, loads, processor time, replicas, beside plain DCP and ML Flashpoint."""
