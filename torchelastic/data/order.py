"""The order of an epoch: one permutation of the dataset per (seed, epoch), the same on every rank of any world."""

from __future__ import annotations

import hashlib

import torch

# Odd, so that multiplying by it modulo 2**32 never maps two epochs to one seed; near 2**32 / golden ratio, which
# spreads neighbouring epochs over the range (Knuth, The Art of Computer Programming, vol. 3, section 6.4).
_EPOCH_STRIDE = 0x9E3779B1


def mixed_seed(seed: int, epoch: int) -> int:
    """Mix a run's seed and an epoch into the seed of a torch generator, 0 to 2**32 - 1. Pure.

    torch's CPU generator uses the lower 32 bits of its seed only. Within one `seed` no two epochs collide (up to 2**32
    of them). Different seeds are hashed apart, so that seed 0's epoch 1 is not seed 1's epoch 0, as it is where the
    two are added.

    Args:
        seed: any integer.
        epoch: from 0 up.
    """
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4, person=b"torchelastic").digest()
    return (int.from_bytes(digest, "little") + epoch * _EPOCH_STRIDE) % 2**32


def epoch_order(dataset_size: int, seed: int, epoch: int, *, shuffle: bool) -> torch.Tensor:
    """Return the dataset's indices in the order of this epoch.

    Args:
        dataset_size: number of samples.
        seed: the run's seed, equal on all ranks.
        epoch: from 0 up.
        shuffle: False for 0, 1, 2, ... in every epoch.

    Returns:
        int64 tensor of shape (dataset_size,), a permutation of 0 to dataset_size - 1.
    """
    if not shuffle:
        return torch.arange(dataset_size)
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(dataset_size, generator=generator)
