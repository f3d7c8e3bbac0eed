"""What adapters share whose framework goes on in the running processes: a step's data, and steps that it drives."""
