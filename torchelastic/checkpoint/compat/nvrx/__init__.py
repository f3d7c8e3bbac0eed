"""NVRx (nvidia-resiliency-ext): `local` checkpoints on the hosts that train, and `async_ckpt`, a queue of calls."""
