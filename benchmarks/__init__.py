"""RankMesh beside gloo and Open MPI, measured in turns: ``python -m benchmarks``, or ``benchmarks.quick`` in a minute.

``benchmarks.page`` writes docs/performance.md and its data page, docs/benchmarks.md.

    operations, patterns, cases      operations with a known result, and the cases of a run
    implementations, adapters        the libraries compared, their launchers and their calls
    workers, worker, rounds          ranks that take orders; implementations measured in turns
    ddp, join, gpu                   training steps; start-up and idle ranks; arrays on GPUs
    results, targets, machine        timings, what they are to reach, the machine
    figures, page, data_page         figures as text, the pages
    session, tune                    a whole run; thresholds between algorithms
    scale                            large jobs at a gateway, for docs/hosts.md
"""
