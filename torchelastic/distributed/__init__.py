"""Small collectives for hand-written `State.sync` methods, with the names of torchelastic 0.1.

The names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchelastic.lazy_names import lazily

if TYPE_CHECKING:
    from torchelastic.distributed.collectives import all_gather_return_max_long as all_gather_return_max_long
    from torchelastic.distributed.collectives import broadcast_binary as broadcast_binary
    from torchelastic.distributed.collectives import broadcast_bool as broadcast_bool
    from torchelastic.distributed.collectives import broadcast_float_list as broadcast_float_list
    from torchelastic.distributed.collectives import broadcast_long as broadcast_long
    from torchelastic.distributed.collectives import broadcast_model as broadcast_model
    from torchelastic.distributed.collectives import convert_to_distributed_tensor as convert_to_distributed_tensor
    from torchelastic.distributed.collectives import convert_to_normal_tensor as convert_to_normal_tensor
    from torchelastic.distributed.collectives import get_rank as get_rank
    from torchelastic.distributed.collectives import is_distributed_training_run as is_distributed_training_run

__getattr__, __dir__ = lazily(__name__)
