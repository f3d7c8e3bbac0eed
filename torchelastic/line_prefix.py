"""What a worker's line begins with on the screen: `[worker 0] `, or what a template of torchrun's makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

OURS = "[worker ${local_rank}] "
#: torchrun's, without a template of the user's.
TORCHRUNS = "[${role_name}${local_rank}]:"
#: What a template may ask for.
MACROS = ("role_name", "local_rank", "rank", "hostname")
#: The rank of a worker that has not been in a group yet.
_NO_RANK = "?"


class LinePrefix:
    """Use it on the agent's event loop.

    Args:
        template: with the macros of torchrun's `--log-line-prefix-template`; others stay as they are.
        role: of all workers.
        host: this host's name.
        ranks: by the worker's number on this host, as far as they are known.
    """

    def __init__(
        self, template: str = OURS, *, role: str = "default", host: str = "", ranks: Mapping[int, int] | None = None
    ) -> None:
        self._template = Template(template)
        self._constant = {"role_name": role, "hostname": host}
        self._ranks = dict(ranks or {})
        self._made: dict[int, str] = {}

    def of(self, worker: int) -> str:
        """What the lines of the worker with this number on this host begin with."""
        if worker not in self._made:
            own = {"local_rank": worker, "rank": self._ranks.get(worker, _NO_RANK)}
            self._made[worker] = self._template.safe_substitute(own, **self._constant)
        return self._made[worker]

    def learn(self, ranks: Mapping[int, int]) -> None:
        """Workers are in a group, with these ranks by their numbers on this host; who is not keeps the last rank."""
        self._ranks.update(ranks)
        self._made.clear()


def unknown_macros(template: str) -> list[str]:
    """What a template asks for and does not get.

    >>> unknown_macros("$rank ${node}: ")
    ['node']
    """
    names = [match["named"] or match["braced"] for match in Template.pattern.finditer(template)]
    return [name for name in names if name and name not in MACROS]
