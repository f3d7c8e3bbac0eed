"""One agent per host: lease, watch, worker supervision, metrics endpoint. Nothing in here may import torch."""
