"""The commands of ``rankmesh``, one file each.

``leaving`` has their exit codes and how they end, ``options`` what most of them take, ``service`` how they ask a
gateway or an agent, ``tables`` and ``words`` how they show what they found. What takes long to load is imported when a
command runs, so that help and completion come at once.
"""
