"""The version of the package; a native core of another version is refused."""

__version__ = "0.1.0"
