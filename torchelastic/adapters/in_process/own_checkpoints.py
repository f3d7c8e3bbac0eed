"""A framework's own checkpoints, where a run goes on from an older one of a checkpoint manager: which do not fit."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchelastic.text import shortlist

log = logging.getLogger(__name__)

#: In the `extra` of a state, and so in the metrics of its checkpoints: steps as frameworks count them.
GLOBAL_STEP = "global_step"


def say_which_do_not_fit(framework: str, global_step: int, found: Mapping[str, int], best: Iterable[str]) -> None:
    """Warn of what the framework would take for the newest, or the best, and is not; on rank 0, when a run resumes.

    Args:
        framework: its name, for people.
        global_step: at which the run goes on, as the framework counts.
        found: the steps of its own checkpoints that are there, by their paths.
        best: paths of those that it takes for the best so far.
    """
    newer = sorted((path for path, step in found.items() if step > global_step), key=lambda path: found[path])
    if newer:
        log.warning(
            "global_step %d: training goes on from the checkpoint manager's checkpoint, and of %s's own these are "
            "newer: %s. They are of steps that are trained again (after a rewind: of those that were taken back), and "
            "%s takes them for the newest until it has replaced them: move them away if they are not wanted",
            global_step, framework, shortlist(newer, 8), framework,
        )  # fmt: skip
    gone = sorted({path for path in best if path and "://" not in path and not Path(path).exists()})
    if gone:
        log.warning(
            "global_step %d: what %s takes for its best checkpoint is not there any more: %s. The steps that came "
            "after this one have removed it, so in the end the best is a later one, or none",
            global_step, framework, shortlist(gone, 8),
        )  # fmt: skip
