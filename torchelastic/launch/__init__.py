"""The command line: `torchelastic run` and `torchelastic drain`, also as `python -m torchelastic.launch`."""
