"""The agent of one host: it starts the workers, and takes part in the run for them. Nothing in here may import torch.

`agent.py` joins the parts that every agent has, which know each other only by the events that they publish
(`host_events.py`); `private_agent.py` is that of one process that was started by hand, which waits for it, so it loads
no more; `launcher_agent.py` has what is below, too. This host's part in the rendezvous is `membership.py`, over
`etcd_opening.py`. Workers are started and watched by `supervisor.py`
(`worker.py`, `worker_environment.py`; `plain_group.py` and `plain_member.py` for scripts that initialise as under
torchrun), and speak to the agent over a socket (`connections.py`). What they print goes through `worker_log.py` to
files and to the screen. What has happened is reported by `failure_reporter.py` (the first cause, decided in
`causes.py`), recorded by `ledger_recorder.py`, and published by `status_publisher.py` and `metrics_endpoint.py`.
"""
