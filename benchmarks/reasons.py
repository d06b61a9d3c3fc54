"""Why a target is missed, by its row in ``targets``: what a profile says limits it. Completes "missed, because ..."."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "shared memory, 2 ranks, all_reduce to 4 KiB": (
        "at 4 B a call in Python takes 4.5 us before it waits (checks of the array 0.3, options 0.3, order and "
        "deadline 0.9, copy 0.3, flags 0.5, numpy.add 0.4, calls between the layers the rest), all of Open MPI's "
        "0.8; the prototype without any checks takes 3.9. At 4 KiB it is within 4x."
    ),
    "shared memory, 2 ranks, all_reduce 64 KiB, 1 MiB": (
        "at 64 KiB both take a copy and an addition from the other core's cache, 14 us where Open MPI takes 15 to 18; "
        "who is faster changes with the machine's mood, which the spread of both shows."
    ),
    "shared memory, 2 ranks, all_reduce 16, 64 MiB": (
        "at 16 MiB the copies are the limit, of half an array into the segment, of half a result into it and of half "
        "a result out of it: registered arrays, which need none, are more than twice as fast as Open MPI. Reading the "
        "other's array with process_vm_readv instead takes half as long again: the kernel copies 11 to 14 GB/s, two "
        "copies through the cache together 20."
    ),
    "shared memory: broadcast, all_gather, reduce_scatter, all_to_all, reduce, gather, scatter, send/recv, "
    "above 1 MiB": (
        "in one run reduce by 2 ranks, in some rounds from 64 KiB on, took up to five times as long as in the others "
        "and in the other run (8.5x there); all_reduce and registered arrays, measured in turn with it, did not. On "
        "its own it does not show, and is not understood."
    ),
    "shared memory: broadcast, all_gather, reduce_scatter, all_to_all, reduce, gather, scatter, send/recv, "
    "from 1 MiB": (
        "where data is only moved, Open MPI and we make the same system call from some MiB on, one process_vm_readv "
        "for each peer (11 to 14 GB/s), so the two are within a few per cent of each other; Open MPI never sleeps "
        "while it waits, we do after 50 us. At 1 MiB ours are two copies in the cache, which are faster, and Python, "
        "5 to 11 of 35 to 50 us."
    ),
    "TCP, 2 and 4 ranks, all_reduce to 64 KiB": (
        "4 ranks send 12 messages a call on 2 cores: of 91 us of processor time a rank, 41 are in sendmsg and 24 in "
        "epoll and recv."
    ),
    "TCP, 2 and 4 ranks, all_reduce 64 MiB": (
        "4 ranks move 402 MB through the kernel on 2 cores; send and recv alone take 0.37 to 0.52 ns a byte there, "
        "75 to 105 ms, before anything is added. gloo moves the same bytes. Directly, by halves or round the ring "
        "takes the same time to a twentieth."
    ),
    "float16 and bfloat16 all_reduce 64 MiB": (
        "bfloat16 with 4 ranks on 2 cores is near the target, and varies from run to run. Of 22 ms of processor time a "
        "rank, 10 are the sum of four parts (1.1 ns an element: four conversions 0.3, three additions 0.3, ml_dtypes' "
        "rounding 0.4), the rest the copies into and out of the segment. float16, which NumPy has no vector "
        "instructions for, takes 1.1 ns for two parts and 1.9 for four (its own conversions would take 7.4 for two)."
    ),
    "store: add": (
        "client and server had to share a core: of 22 us, 12 are two messages and changes of process, and 10 Python "
        "on both sides; torch's server is compiled. With a core each, neither sleeps, and a call takes 15 us."
    ),
    "store: acknowledged set": (
        "client and server had to share a core: of 23 us, 12 are two messages and changes of process, and 11 Python "
        "on both sides; torch's server is compiled. With a core each, neither sleeps, and a call takes 16 us."
    ),
    "store: multi_get of 100 keys": (
        "client and server had to share a core: of 38 us, 14 are two messages and changes of process, and the rest "
        "Python's work on 100 keys and values; torch's time is 100 waits. With a core each a call takes 30 us."
    ),
    "join grows about linearly to 64 ranks": (
        "processes do. 64 ranks as threads of one process share one interpreter lock, and have 2016 connections where "
        "32 have 496: 0.7 ms of processor time each, for a handshake, two rings of shared memory and a group, which "
        "all wait for that lock. Under one lock, work on pairs grows with their number."
    ),
    "DDP, 2 and 4 ranks: the communication part of a step": (
        "an all_reduce of the MLP's buckets and nothing else is 2.5 to 4 times as fast as gloo's. In a step come "
        "torch's own copies of 39 MB of gradients into the buckets and back, which gloo has, too (where gradients lie "
        "in the buckets, it is 2.1 to 2.4x), and every copy and addition takes its time from the backward passes that "
        "run on the same two cores."
    ),
}
