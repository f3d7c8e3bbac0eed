"""What errors of DDP mean here: torch's own texts advise calls that nobody can make, or that a bug be reported."""

from __future__ import annotations

from torchelastic.errors import UnfitError

#: What torch's text has in it, and what to write.
_MEANINGS = {
    "mark a variable ready only once": (
        "a parameter had its gradient twice in one backward pass, as by activation checkpointing that is re-entrant: "
        "write `checkpoint(.., use_reentrant=False)` (Transformers: gradient_checkpointing_kwargs={'use_reentrant': "
        "False}). Where every step uses the same parameters, ModelState(ddp={'static_graph': True}) takes it as it is. "
        "Or a parameter is used outside of `state.model`'s forward pass: call it once for each backward pass"
    ),
    "expect_autograd_hooks_": (
        "ddp={'static_graph': True} does not go with no_sync(): DDP looks at the first backward pass of each group, "
        "which has to be exchanged: leave one of both out"
    ),
}


def why_unfit(error: BaseException) -> UnfitError | None:
    """What to raise in place of an error of DDP that comes again as long as the script is not changed. Pure.

    >>> why_unfit(RuntimeError("Connection closed by peer")) is None
    True
    """
    if not isinstance(error, RuntimeError):
        return None
    found = next((meaning for words, meaning in _MEANINGS.items() if words in str(error)), None)
    return None if found is None else UnfitError(found)


def static_without_sync() -> UnfitError:
    """For `no_sync()` where the graph is static."""
    return UnfitError(_MEANINGS["expect_autograd_hooks_"])
