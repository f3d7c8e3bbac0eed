"""What the ranks of a group say to each other about checkpoints and deadlines, and who is named if one is missing.

On the training thread: `rank_group.py`, in which all ranks say what they are about to do, over collectives with bounded
waits (`watched_group.py`, `messages.py`) or over the group of a train loop (`peers.py`). On threads beside it:
`notes.py`, over the c10d store of the round (`store_mailbox.py`). It is always text or numbers, never a pickle.
"""
