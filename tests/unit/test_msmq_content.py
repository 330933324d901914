"""An envelope as the properties of an MSMQ message, and back."""

import base64
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.msmq_fake import FakeCom, QueueManager, com_error

from postdate.backends.msmq import content as msmq_content
from postdate.backends.msmq.address import QueueAddress
from postdate.backends.msmq.queues import MsmqSession
from postdate.errors import InvalidHeaders, MessageTooLarge, TimeToBeReceivedInTransaction
from postdate.messages import Envelope, Headers, format_timestamp
from postdate.ports import ExpiryRules

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
SECOND = timedelta(seconds=1)
RULES = msmq_content.SendingRules(ExpiryRules(), False, msmq_content.LARGEST_MESSAGE_BYTES)
ORDERS = QueueAddress("orders")


def prepared(envelope, rules=RULES, *, in_transaction=False):
    return msmq_content.encode_message(envelope, ORDERS, "orders@HERE1", NOW, rules, in_transaction=in_transaction)


def blob_of(headers):
    root = ElementTree.Element("ArrayOfHeaderInfo")
    for key, value in headers.items():
        info = ElementTree.SubElement(root, "HeaderInfo")
        ElementTree.SubElement(info, "Key").text, ElementTree.SubElement(info, "Value").text = key, value
    return ElementTree.tostring(root)


@pytest.fixture
def manager() -> QueueManager:
    return QueueManager()


@pytest.fixture
def desk(manager: QueueManager) -> Iterator[MsmqSession]:
    com: FakeCom = manager.process()
    com.initialize()
    desk = MsmqSession(com)
    desk.create(ORDERS, True)
    yield desk
    desk.close()
    com.uninitialize()


def taken(desk: MsmqSession) -> Envelope:
    hold = desk.receive(ORDERS, "orders", True)
    assert hold is not None
    desk.commit(hold, [])
    return hold.envelope


# --- there and back ---------------------------------------------------------------------------------------------------

XML = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"))


@given(
    headers=st.dictionaries(XML.filter(bool), XML, max_size=5),
    body=st.binary(max_size=50),
    message_id=XML.filter(lambda text: bool(text.strip()) and len(text) <= 250),
    due=st.none() | st.datetimes(timezones=st.just(UTC)),
    expires_at=st.none() | st.datetimes(min_value=datetime(2027, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)
def test_an_envelope_comes_back_as_it_was(headers, body, message_id, due, expires_at):
    com = QueueManager().process()
    com.initialize()
    desk = MsmqSession(com)
    desk.create(ORDERS, True)
    sent = Envelope("orders", message_id, headers, body, expires_at, due)
    assert desk.send([prepared(sent)], True) == [None]
    assert taken(desk) == sent


def test_the_headers_are_the_blob_of_the_specification():
    message = prepared(Envelope("orders", "id-1", {Headers.MESSAGE_ID: "m-1", "Größe": "<&>"}))
    assert message is not None
    root = ElementTree.fromstring(message.extension)
    assert root.tag == "ArrayOfHeaderInfo"
    assert {info.tag for info in root} == {"HeaderInfo"}
    read = {info.findtext("Key"): info.findtext("Value") for info in root}
    assert read == {"NServiceBus.MessageId": "m-1", "Größe": "<&>", "Postdate.Queue.MessageId": "id-1"}


def test_a_message_of_nservicebus_has_its_native_id_and_its_own_headers(desk, manager):
    blob = (
        b'<?xml version="1.0"?><ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
        b'xmlns:xsd="http://www.w3.org/2001/XMLSchema"><HeaderInfo><Key>NServiceBus.MessageId</Key><Value>m-1</Value>'
        b"</HeaderInfo><HeaderInfo><Key>empty</Key><Value /></HeaderInfo></ArrayOfHeaderInfo>\0\0"
    )
    manager.put("orders", Extension=blob, Body=b"{}", CorrelationId=bytes(range(20)))
    native_id = manager.queue("orders").entries[0].id
    envelope = taken(desk)
    assert envelope.message_id == msmq_content.from_native_id(native_id)
    assert envelope.headers == {"NServiceBus.MessageId": "m-1", "empty": ""}
    assert envelope.body == b"{}"


def test_a_message_of_any_other_program_is_received_too(desk, manager):
    correlation = uuid.uuid4().bytes_le + (7).to_bytes(4, "little")
    manager.put("orders", Body="Grüße", CorrelationId=correlation)
    manager.put("orders")
    text, nothing = taken(desk), taken(desk)
    assert text.body.decode("utf-16-le") == "Grüße"
    assert msmq_content.to_native_id(text.headers[Headers.CORRELATION_ID]) == correlation
    assert (nothing.headers, nothing.body) == ({}, b"")


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"Extension": b"no xml"}, b"no xml"),
        ({"Extension": b"<!DOCTYPE a><ArrayOfHeaderInfo/>"}, b"<!DOCTYPE a>"),
        ({"Body": 7}, b"7 is not an array of bytes"),
        ({"Body": com_error(-2147221164, "Class not registered", None, None)}, b"Class not registered"),
    ],
)
def test_what_cannot_be_read_is_a_message_all_the_same(desk, manager, caplog, values, kept):
    manager.put("orders", **values)
    envelope = taken(desk)
    assert kept in base64.b64decode(envelope.headers[msmq_content.UNREADABLE])
    assert "cannot be read" in caplog.text


def test_headers_of_ours_that_others_have_spoilt_stay_visible(desk, manager):
    spoilt = {"Postdate.Queue.MessageId": " ", "Postdate.Queue.Due": "soon", "Postdate.Queue.ExpiresAt": "later"}
    manager.put("orders", Extension=blob_of(spoilt))
    native_id = msmq_content.from_native_id(manager.queue("orders").entries[0].id)
    envelope = taken(desk)
    assert envelope.message_id == native_id
    assert (envelope.due, envelope.expires_at) == (None, None)
    assert envelope.headers == {"Postdate.Queue.Due": "soon", "Postdate.Queue.ExpiresAt": "later"}


# --- time to be received ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span", "seconds"),
    [
        (None, -1),
        (30 * SECOND, 30),
        (timedelta(microseconds=1), 1),
        (SECOND + timedelta(microseconds=1), 2),
        (timedelta(seconds=2**31 - 1), 2**31 - 1),
        (timedelta(seconds=2**31 - 1, microseconds=1), -1),
        (timedelta.max, -1),
    ],
)
def test_row_59_the_queue_is_told_whole_seconds_rounded_up_or_infinite(span, seconds):
    message = prepared(Envelope("orders", "id-1", time_to_be_received=span))
    assert message is not None
    assert message.seconds_to_be_received == seconds


@pytest.mark.parametrize(
    ("span", "expires_in", "seconds"), [(None, 10.5, 11), (5 * SECOND, 10.5, 5), (20 * SECOND, 10.5, 11)]
)
def test_an_absolute_expiry_is_a_time_to_be_received_too_and_the_shorter_one_holds(span, expires_in, seconds):
    expires_at = NOW + timedelta(seconds=expires_in)
    message = prepared(Envelope("orders", "id-1", expires_at=expires_at, time_to_be_received=span))
    assert message is not None
    assert message.seconds_to_be_received == seconds


def test_in_a_transaction_an_absolute_expiry_is_left_to_the_receiver_by_its_header():
    message = prepared(Envelope("orders", "id-1", expires_at=NOW + SECOND), in_transaction=True)
    assert message is not None
    assert message.seconds_to_be_received == -1
    assert b"Postdate.ExpiresAt" in message.extension


@pytest.mark.parametrize("late", [timedelta(0), SECOND])
def test_what_is_over_already_is_not_sent_unless_it_is_to_be_a_dead_letter(late):
    lapsed = Envelope("orders", "id-1", expires_at=NOW - late)
    assert prepared(lapsed) is None
    dead = prepared(Envelope("orders", "id-1", expires_at=NOW - late, use_dead_letter_queue=True))
    assert dead is not None
    assert (dead.seconds_to_be_received, dead.journal) == (1, 1)


def test_row_61_in_a_transaction_a_time_to_be_received_is_refused_by_the_name_of_queue_and_machine():
    with pytest.raises(
        TimeToBeReceivedInTransaction, match=r"to orders@HERE1: .*not supported on transactional MSMQ\."
    ):
        prepared(Envelope("orders", "id-1", time_to_be_received=SECOND), in_transaction=True)


@pytest.mark.parametrize(
    ("span", "own", "default", "for_expiring", "journal"),
    [
        (None, None, True, False, 1),
        (None, None, False, True, 0),
        (SECOND, None, True, False, 0),
        (SECOND, None, False, True, 1),
        (SECOND, True, False, False, 1),
        (None, False, True, True, 0),
        (SECOND, False, True, True, 0),
    ],
)
def test_row_71_dead_letters(span, own, default, for_expiring, journal):
    rules = msmq_content.SendingRules(
        ExpiryRules(True, False, default, for_expiring), False, msmq_content.LARGEST_MESSAGE_BYTES
    )
    message = prepared(Envelope("orders", "id-1", time_to_be_received=span, use_dead_letter_queue=own), rules)
    assert message is not None
    assert message.journal == journal


def test_row_71_where_the_native_time_is_left_out_the_message_counts_as_one_without():
    rules = msmq_content.SendingRules(ExpiryRules(True, True, True, False), False, msmq_content.LARGEST_MESSAGE_BYTES)
    message = prepared(Envelope("orders", "id-1", time_to_be_received=SECOND), rules, in_transaction=True)
    assert message is not None
    assert (message.seconds_to_be_received, message.journal) == (-1, 1)


def test_the_journal_is_a_flag_beside_that_of_dead_letters():
    message = prepared(
        Envelope("orders", "id-1"), msmq_content.SendingRules(ExpiryRules(), True, msmq_content.LARGEST_MESSAGE_BYTES)
    )
    assert message is not None
    assert message.journal == 3


# --- limits -----------------------------------------------------------------------------------------------------------


def test_what_only_xml_makes_too_large_is_refused_before_msmq_sees_it():
    room = msmq_content.SendingRules(ExpiryRules(), False, msmq_content.LARGEST_NATIVE_BYTES)
    large = Envelope("orders", "id-1", {"h": "<" * 600_000}, b"x" * (msmq_content.LARGEST_NATIVE_BYTES - 700_000))
    with pytest.raises(MessageTooLarge, match=r"with its headers in XML, and MSMQ takes 4,186,112"):
        prepared(large, room)


def test_a_message_at_the_limit_is_taken_with_what_is_said_about_its_failure(desk):
    headers = {Headers.FAILED_QUEUE: "orders", Headers.EXCEPTION_STACK_TRACE: "<module>\n" * 10_000}
    body = b"x" * (msmq_content.LARGEST_MESSAGE_BYTES - 1_000)
    assert desk.send([prepared(Envelope("orders", "id-1", headers, body))], True) == [None]
    assert len(taken(desk).body) == len(body)


def test_in_a_transaction_what_was_stored_under_wider_limits_is_sent():
    stored = Envelope.from_queue("orders", "x" * 300, {"kind": "check"}, b"", NOW + SECOND, NOW)
    message = prepared(stored, in_transaction=True)
    assert message is not None
    assert format_timestamp(NOW + SECOND).encode() in message.extension


def test_headers_that_xml_cannot_carry_are_refused():
    with pytest.raises(InvalidHeaders, match="'a' has a character that XML cannot carry"):
        prepared(Envelope("orders", "id-1", {"a": "\x01"}))


@pytest.mark.parametrize(("message_id", "label"), [("id-1", "id-1"), ("x" * 250, "x" * 249), ("🕰" * 200, "🕰" * 124)])
def test_the_label_is_the_id_cut_to_what_msmq_takes(message_id, label):
    message = prepared(Envelope("orders", message_id))
    assert message is not None
    assert message.label == label


# --- native ids -------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=20, max_size=20))
def test_native_ids_are_texts_and_back(native):
    assert msmq_content.to_native_id(msmq_content.from_native_id(native)) == native


@pytest.mark.parametrize("text", ["", "m-1", f"{uuid.UUID(int=1)}", f"{uuid.UUID(int=1)}\\4294967296"])
def test_other_texts_are_no_native_ids(text):
    assert msmq_content.to_native_id(text) is None


def test_a_correlation_id_of_msmq_is_a_property_too():
    text = msmq_content.from_native_id(bytes(range(20)))
    message = prepared(Envelope("orders", "id-1", {Headers.CORRELATION_ID: text}))
    other = prepared(Envelope("orders", "id-1", {Headers.CORRELATION_ID: "of ours"}))
    assert message is not None
    assert other is not None
    assert (message.correlation_id, other.correlation_id) == (bytes(range(20)), None)


def test_bytes_come_from_automation_as_any_array():
    for extension in (bytearray(b"<ArrayOfHeaderInfo/>"), memoryview(b"<ArrayOfHeaderInfo/>"), None):
        native = SimpleNamespace(Id=bytes(20), Extension=extension, CorrelationId=bytes(20), Body=(1, 2))
        assert msmq_content.decode_message("orders", native).body == b"\1\2"  # as much as is read
