"""Whether this process only imports the script: `multiprocessing` has started it, and has it do something else."""

from __future__ import annotations

import multiprocessing

from torchelastic.errors import UnfitError

#: What a script has to do where processes that `multiprocessing` starts import it.
PUT_BELOW_MAIN = 'put what the script runs below `if __name__ == "__main__":`'


def is_importing_script() -> bool:
    """Whether `multiprocessing` imports the script in this process just now, as spawn and forkserver have to."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))  # it has no public name


def check_not_importing(does: str) -> None:
    """Raise UnfitError in a process that only imports the script.

    It has the environment of a worker of the run, and would join the run as another one, for which all wait.

    Args:
        does: what the script asks for; completes "imports the script, and ...".
    """
    if is_importing_script():
        raise UnfitError(f"a process that multiprocessing has started imports the script, and {does}: {PUT_BELOW_MAIN}")
