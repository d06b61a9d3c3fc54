"""Key-value stores: keys that ranks share, to meet and to tell each other small things.

``base`` is what every store can do; ``commands`` those whose methods are commands to a table of ours: ``hash`` in this
process, ``tcp`` and ``agent`` here or in another process, ``file`` in a file. ``prefix`` wraps any store, torch's and
others' too.
"""

from __future__ import annotations

from rankmesh._stores.agent import agent_store
from rankmesh._stores.base import Store
from rankmesh._stores.file import FileStore
from rankmesh._stores.hash import HashStore
from rankmesh._stores.prefix import PrefixStore
from rankmesh._stores.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "agent_store"]
