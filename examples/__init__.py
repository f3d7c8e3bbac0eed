"""Programs that show torchelastic at work; each folder runs as a module from the repository root."""
