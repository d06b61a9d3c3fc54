"""Posted receives and unexpected messages against lists that are searched from their beginning."""

from __future__ import annotations

import random

import pytest

from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.message_queues import ANY, Message, PostedReceives, Receive, UnexpectedMessages


def receive(source: int, tag: int) -> Receive:
    return Receive(source, tag, 0, memoryview(b""), Transfer())


class Tag(int):
    """A tag that counts the comparisons of all tags."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Tag.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


@pytest.mark.parametrize("seed", range(20))
def test_the_first_receive_that_matches_a_message(seed: int) -> None:
    dice, queues, posted, matched = random.Random(seed), PostedReceives(), [], []
    for _ in range(300):
        source, tag = dice.randrange(3), dice.randrange(3)
        if dice.random() < 0.4:
            posted.append(receive(ANY if dice.random() < 0.3 else source, tag))
            queues.post(posted[-1])
        elif dice.random() < 0.2 and posted:
            posted.remove(cancelled := dice.choice(posted))
            assert queues.cancel(cancelled.transfer)
            assert not queues.cancel(cancelled.transfer)
        elif dice.random() < 0.2 and matched:  # the message was withdrawn: the receive has its place again
            queues.restore(matched.pop(dice.randrange(len(matched))))
            posted = sorted({*posted, *queues_of(queues)}, key=lambda each: each.number)
        else:
            first = next((each for each in posted if each.tag == tag and each.source in (ANY, source)), None)
            assert queues.first(source, tag) is first
            if first is not None:
                posted.remove(first)
                queues.remove(first)
                matched.append(first)
    for each in posted:
        queues.remove(each)
    assert not queues.queues


def queues_of(queues: PostedReceives) -> list[Receive]:
    return [each for queue in queues.queues.values() for each in queue]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_message_that_matches_a_receive(seed: int) -> None:
    dice, queues, arrived = random.Random(seed), UnexpectedMessages(), []
    for number in range(1, 300):
        source, tag = dice.randrange(3), dice.randrange(3)
        if dice.random() < 0.5:
            arrived.append(Message(source, tag, 0, 0, number))
            queues.add(arrived[-1])
        elif dice.random() < 0.2 and arrived:
            withdrawn = dice.choice(arrived)
            assert queues.announced(withdrawn.source, withdrawn.id) is withdrawn
            arrived.remove(withdrawn)
            queues.remove(withdrawn)
            assert queues.announced(withdrawn.source, withdrawn.id) is None
        else:
            wanted = dice.choice([ANY, source])
            first = next((each for each in arrived if each.tag == tag and wanted in (ANY, each.source)), None)
            assert queues.first(wanted, tag) is first
            if first is not None:
                arrived.remove(first)
                queues.remove(first)
    assert {*queues} == {*arrived}
    for each in arrived:
        queues.remove(each)
    assert not queues.queues
    assert not queues._by_tag


def test_a_match_compares_few_tags_however_many_wait() -> None:
    count = 2000
    posted, arrived = PostedReceives(), UnexpectedMessages()
    for tag in range(count):
        posted.post(receive(1, Tag(tag)))
        arrived.add(Message(1, Tag(tag), 0, 0))
    Tag.compared = 0
    for tag in reversed(range(count)):
        first, message = posted.first(1, tag), arrived.first(1, tag)
        assert first is not None
        assert message is not None
        assert first.tag == message.tag == tag
        posted.remove(first)
        arrived.remove(message)
    assert Tag.compared < 30 * count
