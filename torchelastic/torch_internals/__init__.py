"""Every private name of torch that this package uses, and what is lost where a torch does not have it.

No other file of the package names one, which a test of the house holds. `table.py` lists them: what
each is for, since when torch has it, and what happens without it. `canary.py` tells which of them the installed torch
lacks. The other files are what the package calls in their place, each for one part of torch. Without a name that
nothing can work without, the import of the trainer half says so in one line (`canary.check_torch`). Any other one costs
its feature alone: what is called here then does with less, or refuses, and logs that once (`canary.found`).

Importing this package imports no torch.
"""
