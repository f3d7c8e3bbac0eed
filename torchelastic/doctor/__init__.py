"""Whether this host can train: one finding for each thing that was checked, with its remedy; see docs/doctor.md.

Each subject is a file with facts (a frozen dataclass), `judge_*` (pure: facts in, findings out) and `gather_*` (asks
the host). A new check is such a file, its `Check` in `examination.py`, and its row in docs/doctor.md. What
is promised are the command `torchelastic doctor` and its JSON. Nothing here imports torch, a child is asked for it.
"""
