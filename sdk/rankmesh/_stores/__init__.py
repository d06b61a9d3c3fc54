"""Key-value stores: keys that ranks share, for rendezvous and small messages.

``base`` defines the methods of every store, ``methods`` lists them and ``arguments`` checks their arguments.
``commands`` implements them by commands to a table of keys: ``hash`` in this process, ``tcp`` and ``agent`` in this or
another process, ``file`` in a file. ``prefix`` wraps any store, also those of torch and of users.
"""

from __future__ import annotations

from rankmesh._stores.base import Store
from rankmesh._stores.commands import AgentStore, HashStore
from rankmesh._stores.file import FileStore
from rankmesh._stores.prefix import PrefixStore
from rankmesh._stores.tcp import TCPStore

__all__ = ["AgentStore", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
