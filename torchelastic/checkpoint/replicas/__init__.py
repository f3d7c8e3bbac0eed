"""Replicas of checkpoints on other hosts: who keeps them, how they get there, and who gives them back.

It knows nothing of what is in an object. Nothing is visible before it is whole: the digest of all bytes is compared,
and the fence checked once more, under the lock that `fence` takes. Every wait has a bound. Bytes are not copied on
their way: they are received where the owner wants the object, and sent from where it lies. Users import the names of
`checkpoint.replication`. Nothing here but the manager imports torch.
"""
