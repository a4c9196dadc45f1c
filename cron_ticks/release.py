"""The release of this code."""

__version__ = "0.1.0"
