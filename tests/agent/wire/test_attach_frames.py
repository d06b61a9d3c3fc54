"""The frames of attached processes: golden bytes both ways, and what is refused."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Attachment, Kind
from rankmesh_agent.wire.errors import ProtocolError


def test_a_frame():
    frame = attach_frames.encode(Kind.REQUEST, b"abc", 5, attach_frames.STAGED)
    assert frame == bytes.fromhex("01 04 0000 00000003 0000000000000005 616263")
    assert attach_frames.decode(frame) == (Kind.REQUEST, attach_frames.STAGED, 3, 5)


@pytest.mark.parametrize("lease", ["", "ab" * 16])
def test_an_attachment(lease):
    attachment = Attachment("c3" * 16, bytes(range(32)), lease)
    assert len(attachment.encode()) == attach_frames.ATTACHMENT_BYTES
    assert Attachment.decode(attachment.encode()) == attachment


@pytest.mark.parametrize(
    ("document", "payload"), [(attach_frames.MAX_DOCUMENT + 1, 0), (0, attach_frames.MAX_PAYLOAD + 1)]
)
def test_a_length_over_its_limit_is_refused(document, payload):
    with pytest.raises(ProtocolError, match="at most"):
        attach_frames.decode(attach_frames.HEADER.pack(Kind.OK, 0, document, payload))
