"""One page about a run, made from its journals: what every second was spent on and what each failure cost.

What is promised are the command `torchelastic report` and its JSON; see docs/ledger.md. Nothing here imports torch.
"""
