"""What `ModelState` and `ShardedState` are made of.

A train step's gradients become those of the global batch in `reduction.py`, `wrapping.py` and, with logical shards, in
`logical_shards.py` and `tree_sum.py`. `step_gradients.py` keeps what is needed to repeat or to salvage a failed step,
and `optimizers.py` undoes what optimizers have done in it. `newcomers.py` has what a rank gets that lacks the state,
`transfer.py` brings it there, and `digest.py` checks that all hold the same. `buffer_broadcast.py` has rank 0's buffers
in each forward pass. `companions.py` and `extras.py` have what belongs to a state beside weights.
"""

from torchelastic.torch_internals.canary import check_torch

check_torch()
