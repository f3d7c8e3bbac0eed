"""The version, in the one place that packaging and `torchelastic.__version__` read."""

__version__ = "1.0.0a1"
