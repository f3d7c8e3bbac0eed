"""What is seen of a run: `ledger` (where every second went), `status` (now), `page` (live), `report` (afterwards).

Nothing here imports torch, and nothing decides: workers and agents write the ledger, everything else reads it.
"""
