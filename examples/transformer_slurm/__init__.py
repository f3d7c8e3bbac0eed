"""A Llama-style transformer on a parquet text file, under SLURM, torchrun or alone; it saves and stops in time."""
