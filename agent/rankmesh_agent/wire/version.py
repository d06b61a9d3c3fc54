"""The release number, which the build reads from this file, and that of the protocols between processes."""

__version__ = "0.3.0"
PROTOCOL_VERSION = 3
"""Number of the binary protocols; both ends of a connection have the same."""
