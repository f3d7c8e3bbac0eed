"""What makes this library usable from other training frameworks; each module needs its own one only."""
