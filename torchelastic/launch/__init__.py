"""The command line `torchelastic`, also as `python -m torchelastic.launch`.

`command_line.py` has every command with its options (`torchrun_options.py`: those of torchrun), and each command its
file. `torchelastic run` is `run.py`, with `run_options.py`, `run_log.py` and, without an etcd elsewhere, `own_etcd.py`;
which run the other commands are about says `run_address.py`.
"""
