"""Forms of arrays over HTTP, default arguments, and messages; the sweep has the results of each collective."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from support import oracle
from support.http_ranks import applications, clients, from_npy, from_raw, npy
from support.threads import world

from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.wire.dtypes import FROM_NAME
from rankmesh_agent.wire.ops import ReduceOp

pytestmark = pytest.mark.anyio

SIZE = 3
SHAPE = (2, 5)
NPY, RAW = "application/x-npy", "application/octet-stream"


@pytest.fixture(scope="module")
def trio() -> Iterator[list[SecurityMiddleware]]:
    """The applications of three ranks."""
    with world(SIZE, "segment") as made:
        yield applications(made)


def values(rank, shape=SHAPE, dtype="float32"):
    return oracle.values(rank, int(np.prod(shape)), np.dtype(dtype)).reshape(shape)


async def all_make(trio, call, contents, queries=None, headers=None):
    """Make a call at all ranks at once; return the answers."""
    async with clients(trio) as made:
        return await asyncio.gather(
            *(
                client.post(
                    f"/v1/groups/world/{call}",
                    params=queries[rank] if isinstance(queries, list) else queries,
                    content=contents[rank],
                    headers=headers,
                )
                for rank, client in enumerate(made)
            )
        )


def arrays(answers):
    """Return the arrays of the answers, None where there is none."""
    assert all(answer.status_code in (200, 204) for answer in answers), [answer.text for answer in answers]
    return [from_npy(answer.content) if answer.status_code == 200 else None for answer in answers]


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if found.dtype.char in "gG":  # there are bytes in them that mean nothing
        assert (found == expected).all()
    else:
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "complex64", "bool", "longdouble"])
async def test_npy_of_dtypes_that_it_may_not_know(trio, name):
    dtype = FROM_NAME[name]
    given = [values(rank, dtype=dtype) for rank in range(SIZE)]
    answers = await all_make(trio, "all_gather", list(map(npy, given)), {"dtype": name})
    for answer in answers:
        assert answer.headers["RankMesh-Dtype"] == name
        same(from_npy(answer.content).view(dtype), np.stack(given))


async def test_raw_elements_without_a_shape_are_one_dimension(trio):
    given = [values(rank, (7,)) for rank in range(SIZE)]
    answers = await all_make(trio, "all_reduce", [array.tobytes() for array in given], {"dtype": "float32"})
    for answer in answers:
        same(from_raw(answer), oracle.expected(ReduceOp.SUM, given))


@pytest.mark.parametrize(
    ("bodies", "dtype", "found"),
    [
        (["[[1, 2.5], [3, 4]]"] * 3, None, [[3.0, 7.5], [9.0, 12.0]]),
        (["9007199254740993", "1", "1"], "int64", 9007199254740995),
        (["[]"] * 3, None, []),
        (["[3e38]"] * 3, "float32", [None]),
        (["[1]", "[2]", "[3.5]"], "bfloat16", [6.5]),
    ],
)
async def test_json(trio, bodies, dtype, found):
    async with clients(trio) as made:
        answers = await asyncio.gather(
            *(
                each.post(
                    "/v1/groups/world/all_reduce",
                    content=body,
                    params={} if dtype is None else {"dtype": dtype},
                    headers={"Content-Type": "application/json"},
                )
                for each, body in zip(made, bodies, strict=True)
            )
        )
    for answer in answers:
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json"), answer.text
        assert answer.json() == found


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 1, 2)], ids=str)
async def test_shapes(trio, shape):
    given = [values(rank, shape) for rank in range(SIZE)]
    for array in arrays(await all_make(trio, "all_reduce", list(map(npy, given)))):
        same(array, sum(given[1:], given[0]).astype(np.float32).reshape(shape))
    query = {"dtype": "float32", "shape": ",".join(map(str, shape))}
    for answer in await all_make(trio, "all_reduce", [array.tobytes() for array in given], query):
        assert answer.status_code == 200, answer.text
        assert answer.headers["RankMesh-Shape"] == query["shape"]


@pytest.mark.parametrize("by", ["query", "example"])
async def test_broadcast(trio, by):
    root = 1
    contents = [npy(values(root)) if rank == root else b"" for rank in range(SIZE)]
    query = {"src": root}
    if by == "query":
        query |= {"dtype": "float32", "shape": "2,5"}
    else:
        contents = [contents[rank] or npy(np.zeros(SHAPE, np.float32)) for rank in range(SIZE)]
    found = arrays(await all_make(trio, "broadcast", contents, query))
    assert found.pop(root) is None
    for array in found:
        same(array, values(root))


async def test_gather_and_scatter_have_rank_0_for_root_by_default(trio):
    given = [values(rank) for rank in range(SIZE)]
    found = arrays(await all_make(trio, "gather", list(map(npy, given))))
    same(found.pop(0), np.stack(given))
    assert found == [None, None]
    queries = [None, *[{"dtype": "float32", "shape": "2,5"}] * 2]
    contents = [npy(np.stack(given)), b"", b""]
    for rank, array in enumerate(arrays(await all_make(trio, "scatter", contents, queries))):
        same(array, given[rank])


@pytest.mark.parametrize(("count", "source"), [(0, "any"), (1, "named"), (100_000, "any"), (100_000, "named")])
async def test_messages(trio, count, source):
    array = values(1, (count,), np.float64)
    query = {"tag": -5, "dtype": "float64", "shape": str(count)} | ({"src": 1} if source == "named" else {})
    async with clients(trio) as made:
        sent, received = await asyncio.gather(
            made[1].post("/v1/groups/world/send", params={"dst": 2, "tag": -5}, content=npy(array)),
            made[2].post("/v1/groups/world/recv", params=query),
        )
    assert (sent.status_code, received.status_code) == (204, 200), received.text
    assert received.headers["RankMesh-Source"] == "1"
    same(from_npy(received.content), array)


async def test_the_group_by_its_id(trio):
    async with clients(trio) as made:
        (world_group,) = (await made[0].get("/v1/groups")).json()
        answers = await asyncio.gather(
            *(client.post(f"/v1/groups/{world_group['id']}/barrier", params={"timeout": 20}) for client in made)
        )
    assert [(answer.status_code, answer.content) for answer in answers] == [(204, b"")] * SIZE
