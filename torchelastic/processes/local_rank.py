"""Which worker of its host a process is: the number that its launcher has given it."""

from __future__ import annotations

from collections.abc import Mapping

#: Beside LOCAL_RANK, which is 0 for all workers where each sees its own GPU alone (`--virtual-local-rank`).
LOCAL_RANK_VARIABLE = "TORCHELASTIC_LOCAL_RANK"
#: "1" for such workers: that each sees one GPU does not mean that there is one for all.
OWN_GPU_VARIABLE = "TORCHELASTIC_OWN_GPU"


def local_rank_of(environment: Mapping[str, str]) -> int | None:
    """The number among the workers of the host; None: no launcher has given one.

    >>> local_rank_of({"TORCHELASTIC_LOCAL_RANK": "3", "LOCAL_RANK": "0"}), local_rank_of({"LOCAL_RANK": "1"})
    (3, 1)
    """
    text = environment.get(LOCAL_RANK_VARIABLE) or environment.get("LOCAL_RANK", "")
    return int(text) if text.isdecimal() else None
