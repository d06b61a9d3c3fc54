"""Collectives and messages of the public interface: argument checks, and one call to a communicator."""
