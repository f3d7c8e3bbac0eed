"""The same training before and after a move to torchelastic, for each system that docs/migrating has a page for."""
