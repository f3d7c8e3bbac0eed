"""Whether this process only imports the script: `multiprocessing` has started it, and has it do something else."""

from __future__ import annotations

import multiprocessing

#: What a script has to do where processes that `multiprocessing` starts import it.
PUT_BELOW_MAIN = 'put what the script runs below `if __name__ == "__main__":`'


def is_importing_script() -> bool:
    """Whether `multiprocessing` imports the script in this process just now, as spawn and forkserver have to.

    Such a process has the environment of a worker of the run, and would join the run as another one.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))  # it has no public name
