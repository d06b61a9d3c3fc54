"""Algorithms on wait-for graphs: for each rank, the ranks that it waits for. Pure: no I/O."""

from __future__ import annotations

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
    """Return the strongly connected components of a graph that no edge leaves (Kosaraju's algorithm)."""
    nodes = {*edges, *(other for others in edges.values() for other in others)}
    order: list[int] = []
    seen: set[int] = set()
    for root in sorted(nodes):
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(sorted(edges.get(root, ()))))]
        while stack:
            node, left = stack[-1]
            fresh = next((other for other in left if other not in seen), None)
            if fresh is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(fresh)
                stack.append((fresh, iter(sorted(edges.get(fresh, ())))))
    back: dict[int, list[int]] = defaultdict(list)
    for node, others in edges.items():
        for other in others:
            back[other].append(node)
    component_of: dict[int, int] = {}
    components: list[set[int]] = []
    for root in reversed(order):
        if root in component_of:
            continue
        todo = [root]
        component_of[root] = len(components)
        members = set()
        while todo:
            node = todo.pop()
            members.add(node)
            fresh_nodes = [other for other in back[node] if other not in component_of]
            component_of.update(dict.fromkeys(fresh_nodes, len(components)))
            todo += fresh_nodes
        components.append(members)
    return [each for each in components if all(other in each for node in each for other in edges.get(node, ()))]
