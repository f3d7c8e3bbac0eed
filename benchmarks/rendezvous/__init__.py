"""`python -m benchmarks.rendezvous`: one round at N members on a real etcd, beside torch's own handlers."""
