"""The commands of ``rankmesh``, one file each.

``exit_codes`` ends commands, ``options`` has the options most of them share, ``client`` queries gateways and agents,
``tables`` and ``humanize`` format results. Modules that load slowly are imported when a command runs, so that help and
completion are immediate.
"""
