"""The version of sebp-edge, which is written into what it saves."""

__version__ = "0.1.0"
