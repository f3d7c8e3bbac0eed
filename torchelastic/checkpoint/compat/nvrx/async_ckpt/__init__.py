"""Calls that are finished in the background, on all ranks together: `torchelastic.checkpoint.async_ckpt`.

`calls_queue.py` has the order of calls; `call_agreement.py` how ranks agree that one is done; `worker_process.py`,
`worker_main.py` and `shipping.py` the process beside the trainer; `torch_checkpoint.py` a `torch.save` on that way.
"""
