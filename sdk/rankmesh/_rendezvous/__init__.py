"""From an init method to a gateway's HTTP address: who hosts it, and where this rank listens."""

from rankmesh._rendezvous.methods import Rendezvous, rendezvous

__all__ = ["Rendezvous", "rendezvous"]
