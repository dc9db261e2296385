"""The package's version, for whatever names it in what it writes."""

__version__ = "0.1.0"
