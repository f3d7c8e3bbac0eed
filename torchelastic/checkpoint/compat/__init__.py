"""The front doors of the five systems that live on here: their names and promises, over `engine`, `store` and `format`.

Users import them from `torchelastic.checkpoint`, `.memory`, `.local`, `.async_ckpt` and `.replication`.
"""
