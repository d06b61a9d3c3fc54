"""Calls in words and as fingerprints."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rankmesh_agent.wire.ops import Call, OpType, PremulSum, ReduceOp

F4, F8 = np.dtype("float32"), np.dtype("float64")

GOLDEN = [
    (Call(OpType.BARRIER), "barrier()", 0xE51FBED65173655B),
    (Call(OpType.ALL_REDUCE, F4, 1024, ReduceOp.SUM), "all_reduce(float32[1024], SUM)", 0x248F0E273C4BF962),
    (Call(OpType.BROADCAST, np.dtype("uint8"), 0, root=3), "broadcast(uint8[0], src=3)", 0xE6B12AFD3E45DCF7),
    (Call(OpType.NEW_GROUP, subject="ranks 0, 2"), "new_group(ranks 0, 2)", 0xB6F44CCB498FE5AB),
    (Call(OpType.REDUCE, F8, 2, ReduceOp.AVG, root=1), "reduce(float64[2], AVG, dst=1)", 0x80B864D8D6DDAE45),
    (Call(OpType.GATHER, F4, 5, root=0), "gather(float32[5], dst=0)", 0xB3D522743E21C78E),
    (Call(OpType.SCATTER, F4, 5, root=0), "scatter(float32[5], src=0)", 0xD9F40BC639D49701),
    (Call(OpType.ALL_GATHER, F4, -1, counts=(3, 0, 4)), "all_gather(float32[3+0+4])", 0x234F588FC84F7405),
    (
        Call(OpType.REDUCE_SCATTER, F4, -1, ReduceOp.PREMUL_SUM, counts=(1, 2)),
        "reduce_scatter(float32[1+2], PREMUL_SUM)",
        0x3340AA242D31D55C,
    ),
    (Call(OpType.ALL_TO_ALL, np.dtype("bool"), -1), "all_to_all(bool)", 0xC38479AE0DE903A5),
]


@pytest.mark.parametrize(("call", "words", "fingerprint"), GOLDEN)
def test_words_and_fingerprint_are_stable(call, words, fingerprint):
    assert str(call) == words
    assert call.fingerprint == fingerprint


def test_equal_calls_have_equal_fingerprints():
    one, other = (Call(OpType.ALL_GATHER, np.dtype(name), 7) for name in ("int64", "longlong"))
    assert one == other
    assert one.fingerprint == other.fingerprint


def test_each_field_makes_a_difference():
    calls = [
        Call(OpType.BROADCAST, F4, 10, root=0),
        Call(OpType.ALL_GATHER, F4, 10, root=0),
        Call(OpType.BROADCAST, F8, 10, root=0),
        Call(OpType.BROADCAST, F4.newbyteorder(), 10, root=0),
        Call(OpType.BROADCAST, F4, 11, root=0),
        Call(OpType.BROADCAST, F4, 10, ReduceOp.SUM, root=0),
        Call(OpType.BROADCAST, F4, 10, ReduceOp.MAX, root=0),
        Call(OpType.BROADCAST, F4, 10, root=1),
        Call(OpType.BROADCAST, F4, 10),
        Call(OpType.BROADCAST, F4, 10, root=0, subject="ranks 0, 1"),
        Call(OpType.ALL_GATHER, F4, -1, counts=(4, 6)),
        Call(OpType.ALL_GATHER, F4, -1, counts=(6, 4)),
        Call(OpType.ALL_GATHER, F4, -1, counts=(4, 6, 0)),
        Call(OpType.ALL_GATHER, F4, -1),
        Call(OpType.REDUCE, F4, 10, ReduceOp.SUM, root=0),
        Call(OpType.SCATTER, F4, 10, root=0),
        Call(OpType.GATHER, F4, 10, root=0),
    ]
    for one, other in itertools.combinations(calls, 2):
        assert one.fingerprint != other.fingerprint, f"{one} and {other}"


@pytest.mark.parametrize(
    ("call", "nbytes"),
    [
        (Call(OpType.BARRIER), 0),
        (Call(OpType.BROADCAST, F8, 3, root=0), 24),
        (Call(OpType.BROADCAST, F4, 1 << 31), 1 << 33),
        (Call(OpType.ALL_GATHER, F8, -1, counts=(1, 5, 0)), 40),
        (Call(OpType.ALL_TO_ALL, F8, -1), 0),
    ],
)
def test_bytes_of_the_largest_contribution(call, nbytes):
    assert call.nbytes == nbytes


def test_numbers_of_kinds_and_reduce_ops_are_stable():
    kinds = "BARRIER ALL_REDUCE BROADCAST ALL_GATHER NEW_GROUP REDUCE GATHER SCATTER REDUCE_SCATTER ALL_TO_ALL EMPTY"
    assert [(kind.value, kind.name) for kind in OpType] == list(enumerate(kinds.split(), 1))
    ops = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR PREMUL_SUM"
    assert [(op.value, op.name) for op in ReduceOp] == list(enumerate(ops.split()))


def test_only_premul_sum_takes_a_factor():
    assert ReduceOp.PREMUL_SUM(0.5) == PremulSum(0.5)
    assert ReduceOp.PREMUL_SUM(2j).factor == 2j
    for op in set(ReduceOp) - {ReduceOp.PREMUL_SUM}:
        with pytest.raises(TypeError, match=rf"ReduceOp\.{op.name} takes no factor"):
            op(0.5)
