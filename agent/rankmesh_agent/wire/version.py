"""The one place where the release number stands; the build reads it here."""

__version__ = "0.1.0"
