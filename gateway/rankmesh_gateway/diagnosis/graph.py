"""Algorithms on wait-for graphs: for each rank, the ranks that it waits for. Pure: no I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping


def reaching(edges: Mapping[int, Collection[int]], targets: set[int]) -> set[int]:
    """Return the nodes from which a path leads to one of the targets, and the targets."""
    back: dict[int, list[int]] = defaultdict(list)
    for node, others in edges.items():
        for other in others:
            back[other].append(node)
    found, todo = set(targets), list(targets)
    while todo:
        fresh = [node for node in back[todo.pop()] if node not in found]
        found.update(fresh)
        todo += fresh
    return found


def final_components(edges: Mapping[int, Collection[int]]) -> list[set[int]]:
    """Return the strongly connected components of a graph that no edge leaves (Tarjan's algorithm)."""
    numbers: dict[int, int] = {}
    lowest: dict[int, float] = {}
    """The least number of a node that a path leads to; infinite once the node's component is complete."""
    path: list[int] = []
    found: list[set[int]] = []
    todo = [(node, False) for node in sorted(edges, reverse=True)]
    while todo:
        node, is_left = todo.pop()
        others = edges.get(node, ())
        if is_left:
            lowest[node] = min([lowest[node], *(lowest[other] for other in others)])
            if lowest[node] == numbers[node]:
                component: set[int] = set()
                while node not in component:
                    component.add(path.pop())
                lowest.update(dict.fromkeys(component, math.inf))
                if all(other in component for each in component for other in edges.get(each, ())):
                    found.append(component)
        elif node not in numbers:
            numbers[node] = lowest[node] = len(numbers)
            path.append(node)
            todo.append((node, True))
            todo += [(other, False) for other in others if other not in numbers]
    return found
