"""RankMesh beside gloo and Open MPI, measured in turns within one run.

``python -m benchmarks`` measures everything and writes docs/benchmarks.md, or with ``--only`` prints a part of it;
``benchmarks.quick`` takes under a minute, ``benchmarks.page`` shows several runs side by side, and ``benchmarks.tune``
finds where the table of algorithms switches.

    operations, patterns    what is measured, and how its result is known to be right
    peers, worlds           who is measured: how it is started, and its calls
    team, channel, rank     the ranks of one peer, and how they are given orders
    plan, run, session      which cases, how often; peers taking turns; everything one after the other
    store, stores           the same for stores
    ddp, ddp_rank           training steps with torch's DistributedDataParallel
    mpi_overhead            what backend "mpi" adds to bare mpi4py
    gpu, gpu_rank, gpu_report
                            all_reduce of arrays on GPUs
    join, join_rank         how long a world takes to come together
    footprint               what an idle rank costs
    tune, tune_rank         where the table of algorithms switches
    hosts                   bytes and times between hosts, which are network namespaces
    results, summary        what came out, and as JSON
    targets, reasons        what is to be reached, and why it is not
    report, tables          the page
    charts, svg             its charts
    compact, options        what command lines print, and what they take
    machine                 what it was measured on
"""
