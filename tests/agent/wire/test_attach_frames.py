"""The frames of attached processes: golden bytes both ways, and what is refused."""

from __future__ import annotations

import pytest

from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Call, Request, Response
from rankmesh_agent.wire.errors import ProtocolError

CALL = Call(0x0102, 2.5, -1, 7, 3, 2, 0, 11, (4,), (5, 6), "split")
GOLDEN = (
    "0000000000000102 4004000000000000 ffffffffffffffff 0000000000000007 00000003 02 00 000b 0001 0002"
    "0000000000000004 0000000000000005 0000000000000006 73706c6974"
)


def test_a_frame():
    frame = attach_frames.encode(Request.CALL, b"abc", 5, attach_frames.BLOCKING)
    assert frame == bytes.fromhex("11 02 0000 00000003 0000000000000005 616263")
    assert attach_frames.decode(frame) == (Request.CALL, attach_frames.BLOCKING, 3, 5)


def test_a_call():
    document = attach_frames.encode_call(CALL)
    assert document == bytes.fromhex(GOLDEN)
    assert attach_frames.decode_call(document) == CALL


def test_details_of_a_call():
    document = attach_frames.encode_call(CALL._replace(details="here"))
    assert document == bytes.fromhex(GOLDEN) + b"\0here"
    assert attach_frames.decode_call(document).details == "here"


@pytest.mark.parametrize(
    ("document", "payload"), [(attach_frames.MAX_DOCUMENT + 1, 0), (0, attach_frames.MAX_PAYLOAD + 1)]
)
def test_a_length_over_its_limit_is_refused(document, payload):
    with pytest.raises(ProtocolError, match="at most"):
        attach_frames.decode(attach_frames.HEADER.pack(Response.OK, 0, document, payload))


@pytest.mark.parametrize("cut", [1, 20, len(bytes.fromhex(GOLDEN)) - 8])
def test_a_call_that_lacks_something_is_refused(cut):
    with pytest.raises(ProtocolError, match="described a call"):
        attach_frames.decode_call(bytes.fromhex(GOLDEN)[:cut])


def test_a_subject_that_is_no_text_is_refused():
    with pytest.raises(ProtocolError, match="described a call"):
        attach_frames.decode_call(bytes.fromhex(GOLDEN)[:-1] + b"\xff")


@pytest.mark.parametrize("document", [b"", b"[]", b"{", b"\xff"])
def test_a_document_that_is_no_json_object_is_refused(document):
    with pytest.raises(ProtocolError, match="no JSON"):
        attach_frames.decode_json(document)
