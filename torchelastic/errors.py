"""The exceptions with which user code, the train loop and a coordinator talk to each other."""

from __future__ import annotations


class StopException(Exception):  # noqa: N818 - a name of the public API
    """The run is over for this worker, and that is fine: `train` returns."""


class DrainedException(StopException):
    """This worker was asked to leave the run and has left it; the others go on, if there are enough of them."""


class NonRetryableException(Exception):  # noqa: N818 - a name of the public API
    """Trying again cannot help: `train` raises it."""


class UnfitError(NonRetryableException):
    """What the script has built does not fit, and any other process of it would build the same: no restart can help."""


class UnfitStateError(UnfitError, ValueError):
    """The same, of a state that is to be loaded: it is of another model, or of other optimizers."""


class UnsavableError(UnfitError, TypeError):
    """A state holds what no checkpoint can: names it."""


class ComputeCheckError(NonRetryableException):
    """A check of what workers compute has ended the run: see `torchelastic.ComputeCheck`."""


class ComputesWrongError(ComputeCheckError):
    """This worker was found to compute wrong: it leaves the run, and is not started again on its host.

    Attributes:
        step: the one in which it was found, counted from 1.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class RetryableException(RuntimeError):  # noqa: N818 - a name of the public API
    """For user code: undo this step on every worker and try it again."""


def is_retryable(error: BaseException) -> bool:
    """Whether a failed step is undone and repeated: RuntimeErrors are, but not those that only a programmer can mend.

    All errors of collectives and of a full GPU memory are RuntimeErrors in torch.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, (NotImplementedError, RecursionError))
