"""One page about a run, made from its journals: what every second was spent on and what each failure cost.

Journals are read (`journals.py`), put on one clock and made a `Report` (`building.py`), which becomes JSON or the
page. Only reading touches a disk. What is promised are the command `torchelastic report` and its JSON; see
docs/ledger.md. Nothing here imports torch.
"""
