"""Classes that are public in `torch.distributed`, but not in the eyes of type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, Store, TCPStore  # noqa: F401 - for other files
