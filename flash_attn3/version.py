"""The library's version; the build reads it from here as text, so this file imports nothing."""

__version__ = "3.0.0"
