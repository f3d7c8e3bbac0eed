"""The command line: `torchelastic run`, also as `python -m torchelastic.launch run`."""
