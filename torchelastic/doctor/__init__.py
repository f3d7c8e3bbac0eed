"""Whether this host can train: one finding for each thing that was checked, with its remedy; see docs/doctor.md.

What is promised are the command `torchelastic doctor` and its JSON. Nothing here imports torch.
"""
