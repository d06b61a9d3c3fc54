"""Rendezvous: resolves an init method to the gateway's address, and hosts the gateway where this process must."""

from rankmesh._rendezvous.methods import Rendezvous, resolve_init_method, resolve_late_join

__all__ = ["Rendezvous", "resolve_init_method", "resolve_late_join"]
