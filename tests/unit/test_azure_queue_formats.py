"""Addresses of accounts, names of queues, times to live and envelopes of Azure Storage: pure, without a server."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError
from hypothesis import given
from hypothesis import strategies as st

from postdate import Envelope, errors
from postdate.backends.azure.envelope import LARGEST_MESSAGE_BYTES, LARGEST_TEXT_BYTES, UNREADABLE, from_text, to_text
from postdate.backends.azure.errors import QUEUES, TABLES, retry_after, translate
from postdate.backends.azure.login import parse_login
from postdate.backends.azure.queues import FOR_EVER, SANITIZERS, queue_name, sanitizer_of, time_to_live
from postdate.backends.azure.transport import AzureStorageQueueTransport
from postdate.config import Address, check_server
from postdate.messages import Headers, encode_headers, size_in_bytes

NOW = datetime(2026, 1, 31, 12, 0, 5, 123_456, tzinfo=UTC)
KEY = base64.b64encode(b"a key with / and + in its base64: \xff\xfe\xfb\xef\xbe").decode()
ESCAPED = KEY.replace("/", "%2F").replace("+", "%2B")
THIRTY_DAYS_IN_SECONDS = 30 * 24 * 3600


# --- addresses --------------------------------------------------------------------------------------------------------


def test_an_address_with_an_account_and_a_key_names_all_three_services() -> None:
    login = parse_login(f"azure-queues://shop:{ESCAPED}@shop.queue.core.windows.net")
    assert (login.account, login.key) == ("shop", KEY)
    assert login.endpoints == {
        "queue": "https://shop.queue.core.windows.net",
        "table": "https://shop.table.core.windows.net",
        "blob": "https://shop.blob.core.windows.net",
    }
    assert parse_login(f"azure-table://shop:{ESCAPED}@shop.table.core.windows.net").endpoints == login.endpoints


def test_an_address_may_name_every_endpoint() -> None:
    login = parse_login(
        f"azure-table://dev:{ESCAPED}@127.0.0.1:10002/dev?protocol=http&queues=127.0.0.1:10001&blobs=127.0.0.1:10000"
    )
    assert [login.endpoint(service) for service in ("queue", "table", "blob")] == [
        f"http://127.0.0.1:{port}/dev" for port in (10_001, 10_002, 10_000)
    ]


def test_a_service_that_the_address_does_not_name_is_missed_where_it_is_needed() -> None:
    login = parse_login(f"azure-queues://dev:{ESCAPED}@127.0.0.1:10001/dev?protocol=http")
    with pytest.raises(errors.ConfigurationError, match=r"where its blob service is; add blobs=HOST:PORT"):
        login.endpoint("blob")


@pytest.mark.parametrize("address", ["azure-queues://UseDevelopmentStorage", "UseDevelopmentStorage=true"])
def test_the_emulator_has_a_name_of_its_own(address: str) -> None:
    assert parse_login(address).endpoint("queue") == "http://127.0.0.1:10001/devstoreaccount1"


def test_a_connection_string_stands_in_the_environment_or_in_a_file(tmp_path: Path) -> None:
    text = f"DefaultEndpointsProtocol=https;AccountName=shop;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn"
    (tmp_path / "secret").write_text(text + "\n", encoding="utf-8")
    plain = parse_login(text)
    assert plain.endpoint("table") == "https://shop.table.core.chinacloudapi.cn"
    assert parse_login("azure-queues://?connection=env:SHOP", {"SHOP": text}) == plain
    assert parse_login(f"azure-table://?connection=file:{tmp_path / 'secret'}") == plain


def test_a_connection_string_may_have_a_signature_instead_of_a_key() -> None:
    login = parse_login("QueueEndpoint=https://shop.queue.core.windows.net/;SharedAccessSignature=?sv=1&sig=secret")
    assert (login.account, login.key, login.signature) == ("shop", None, "sv=1&sig=secret")
    assert "secret" not in repr(login)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("azure-queues://shop.queue.core.windows.net", "no account, key or host"),
        (f"azure-queues://shop:{ESCAPED}@", "no account, key or host"),
        ("azure-queues://shop:notbase64!@shop.queue.core.windows.net", "not base64"),
        (f"azure-queues://shop:{ESCAPED}@host?protcol=http", "unknown option 'protcol'"),
        (f"azure-queues://shop:{ESCAPED}@host?protocol=ftp", "http or https"),
        (f"azure-queues://shop:{ESCAPED}@host:port", "cannot be read"),
        ("azure-queues://?connection=env:NOT_SET_ANYWHERE", "'NOT_SET_ANYWHERE', which is not set"),
        ("azure-queues://?connection=AccountName=a", "must refer to the connection string"),
        ("azure-queues://?connection=file:/no/such/file", "cannot be read"),
        (f"azure-queues://shop:{ESCAPED}@host?connection=env:X", "use only one"),
        ("amqp://shop:x@host", "another scheme"),
        (f"AccountKey={KEY}", "not a connection string"),
        ("", "not a connection string"),
    ],
)
def test_an_address_that_cannot_work_is_refused_without_its_key(address: str, said: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=said) as refusal:
        parse_login(address, {})
    assert KEY not in str(refusal.value)
    assert ESCAPED not in str(refusal.value)


def test_no_key_is_ever_shown() -> None:
    text = f"azure-queues://shop:{ESCAPED}@shop.queue.core.windows.net"
    assert repr(Address(text)) == "'azure-queues://shop:***@shop.queue.core.windows.net'"
    transport = AzureStorageQueueTransport(text)
    shown = f"{transport!r} {transport.service.login!r} {transport.service.describe_queue('orders')}"
    assert KEY not in shown
    assert "shop.queue.core.windows.net" in shown


@pytest.mark.parametrize(
    "address",
    [
        f"azure-queues://shop:{ESCAPED}@shop.queue.core.windows.net",
        f"azure-table://dev:{ESCAPED}@127.0.0.1:10002/dev?protocol=http&blobs=127.0.0.1:10000",
        "azure-queues://?connection=env:SHOP",
        "azure-table://UseDevelopmentStorage",
    ],
)
def test_the_configuration_takes_every_form(address: str) -> None:
    check_server(address)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrent_sends": 0}, "concurrent_sends"),
        ({"hold_for": timedelta(milliseconds=1_500)}, "hold_for"),
        ({"hold_for": timedelta(0)}, "hold_for"),
        ({"hold_for": timedelta(days=8)}, "hold_for"),
        ({"peek_interval": timedelta(0)}, "peek_interval"),
        ({"longest_idle_wait": timedelta(milliseconds=1)}, "longest_idle_wait"),
        ({"sanitizer": "none"}, "dashes"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict, said: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=said):
        AzureStorageQueueTransport("azure-queues://UseDevelopmentStorage", **settings)


# --- names of queues --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sanitizer", "name", "expected"),
    [
        ("strict", "Sales", "sales"),
        ("dashes", "Sales", "sales"),
        ("dashes", "Sales.Timeouts", "sales-timeouts"),
        ("legacy", "Sales.Orders__New!", "sales-orders-new-"),
        ("legacy", "a--b", "a-b"),
    ],
)
def test_names_are_made_such_that_azure_takes_them(sanitizer: str, name: str, expected: str) -> None:
    clean = SANITIZERS[sanitizer](name.lower())
    assert clean == expected
    if not expected.endswith("-"):
        assert queue_name(name, SANITIZERS[sanitizer]) == expected


def test_the_legacy_name_of_a_long_queue_ends_in_a_number_made_from_all_of_it() -> None:
    long = "A" * 70
    name = queue_name(long, SANITIZERS["legacy"])
    assert name == queue_name(long.lower(), SANITIZERS["legacy"])
    # The MD5 of 70 times "a" is 0f5c6c4e740bfcc08c3c26ccb2673d46; a GUID has its first three parts backwards.
    assert name == f"{'a' * 26}-4e6c5c0f-0b74-c0fc-8c3c-26ccb2673d46"
    assert len(name) == 63
    assert queue_name(long + "b", SANITIZERS["legacy"]) != name


@pytest.mark.parametrize("name", ["ab", "a" * 64, "-ab", "ab-", "a--b", "a_b", "", "naïve", "a b", "a.b"])
def test_a_name_that_azure_does_not_take_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="3 to 63 letters, digits and single dashes"):
        queue_name(name, SANITIZERS["strict"])


def test_a_sanitizer_of_ones_own_is_used_and_its_failure_is_told() -> None:
    def fail(name: str) -> str:
        raise KeyError(name)

    assert queue_name("Orders", sanitizer_of(lambda name: f"eu-{name}")) == "eu-orders"
    with pytest.raises(errors.ConfigurationError, match="sanitizer of queue names failed for 'Orders'"):
        queue_name("Orders", fail)


@given(st.text(max_size=300))
def test_whatever_the_legacy_sanitizer_makes_is_refused_or_taken(name: str) -> None:
    try:
        clean = queue_name(name, SANITIZERS["legacy"])
    except errors.ConfigurationError:
        return
    assert 3 <= len(clean) <= 63
    assert set(clean) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert "--" not in clean
    assert "-" not in {clean[0], clean[-1]}


# --- how long ---------------------------------------------------------------------------------------------------------


def _lasting(span: timedelta | None, left: timedelta | None = None, headers: dict[str, str] | None = None) -> Envelope:
    expires_at = None if left is None else NOW + left
    return Envelope("orders", "m", headers or {}, b"", expires_at, time_to_be_received=span)


@pytest.mark.parametrize(
    ("envelope", "seconds"),
    [
        (_lasting(None), THIRTY_DAYS_IN_SECONDS),
        (_lasting(timedelta(seconds=5)), 5),
        (_lasting(timedelta(seconds=5, microseconds=1)), 6),
        (_lasting(timedelta(microseconds=1)), 1),
        (_lasting(timedelta(days=30)), THIRTY_DAYS_IN_SECONDS),
        (_lasting(None, timedelta(milliseconds=10_500)), 11),
        (_lasting(None, timedelta(days=400)), THIRTY_DAYS_IN_SECONDS),
        (_lasting(timedelta(seconds=9), timedelta(seconds=4)), 4),
        (_lasting(timedelta(0)), None),
        (_lasting(timedelta(seconds=-1)), None),
        (_lasting(None, timedelta(0)), None),
        (_lasting(timedelta(days=1), timedelta(seconds=-5)), None),
        (_lasting(timedelta(seconds=1), None, {Headers.FAILED_QUEUE: "orders"}), FOR_EVER),
        (_lasting(timedelta(days=31), timedelta(days=-1), {Headers.FAILED_QUEUE: "orders"}), FOR_EVER),
    ],
)
def test_a_message_lives_for_whole_seconds_rounded_up(envelope: Envelope, seconds: int | None) -> None:
    assert time_to_live(envelope, NOW) == seconds


def test_more_than_thirty_days_are_refused() -> None:
    with pytest.raises(errors.InvalidMessage, match="at most 30 days"):
        time_to_live(_lasting(timedelta(days=30, microseconds=1)), NOW)


# --- envelopes --------------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
_TIMES = st.none() | st.datetimes(timezones=st.just(UTC))


@given(
    message_id=_TEXT.filter(lambda text: text.strip() and "\0" not in text),
    headers=st.dictionaries(_TEXT.filter(bool), _TEXT, max_size=5),
    body=st.binary(max_size=300),
    due=_TIMES,
    expires_at=_TIMES,
)
def test_every_message_comes_back_as_it_was(
    message_id: str, headers: dict[str, str], body: bytes, due: datetime | None, expires_at: datetime | None
) -> None:
    sent = Envelope("orders", message_id, headers, body, expires_at, due)
    text = to_text(sent)
    assert text.isascii()
    assert from_text("orders", "native", text) == sent


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=200))
def test_any_other_text_is_kept_whole_and_says_why_it_is_none(text: str) -> None:
    came = from_text("orders", "native", text)
    assert came.body == text.encode()
    assert came.message_id == "native"
    assert came.headers[UNREADABLE].startswith("not a message in the envelope of Azure Storage Queues")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "neither JSON nor UTF-8 in base64"),
        (base64.b64encode(b"\xff\xfe\xfd").decode(), "neither JSON nor UTF-8"),
        (base64.b64encode(b"hello").decode(), "not a JSON object"),
        (base64.b64encode(b"[1]").decode(), "not a JSON object (Expected `object`, got `array`)"),
        ('{"OrderId": 5}', "neither Headers nor Body"),
        ('{"Headers": [], "Body": ""}', "Headers is not a JSON object"),
        ('{"Headers": {"a": 1}, "Body": ""}', "must be str"),
        ('{"Headers": {}, "Body": 1}', "Body is not text"),
        ('{"Headers": {}, "Body": "?"}', "Body is not base64"),
        ('{"Headers"', "not a JSON object"),
        ('{"Headers":' + "[" * 60_000, "recursion"),
    ],
)
def test_what_is_wrong_with_a_foreign_text_is_said(text: str, reason: str) -> None:
    came = from_text("orders", "native", text)
    assert reason in came.headers[UNREADABLE]
    assert came.body == text.encode()


def _wrapped(**fields: object) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: text,
        lambda text: base64.b64encode(text.encode()).decode(),
        lambda text: base64.b64encode(b"\xef\xbb\xbf" + text.encode()).decode(),
        lambda text: "\ufeff" + text,
    ],
    ids=["plain", "base64", "base64 with a mark", "plain with a mark"],
)
def test_an_envelope_of_others_is_read_in_every_coding(encode: Callable[[str], str]) -> None:
    text = _wrapped(Id="m-1", Headers={"a": "b", "none": None}, Body=base64.b64encode(b"body").decode(), Else=[1])
    came = from_text("orders", "native", encode(text))
    assert came == Envelope("orders", "m-1", {"a": "b", "none": ""}, b"body")


def test_what_only_the_wrapper_says_becomes_a_header_and_headers_win() -> None:
    wrapper = {
        "Headers": {Headers.CORRELATION_ID: "c-1"},
        "Body": None,
        "ReplyToAddress": "back",
        "CorrelationId": "c-2",
    }
    came = from_text("orders", "native", _wrapped(**wrapper))
    assert came.headers == {Headers.CORRELATION_ID: "c-1", Headers.REPLY_TO_ADDRESS: "back"}
    assert came.body == b""


@pytest.mark.parametrize("message_id", [None, "", "  ", 5, "x" * 251])
def test_an_id_that_cannot_be_kept_is_replaced_by_azures_own(message_id: object) -> None:
    assert from_text("orders", "native", _wrapped(Id=message_id, Body="")).message_id == "native"


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["body", "both", "headers"])
def test_what_the_capability_promises_fits(share: float) -> None:
    transport = AzureStorageQueueTransport("azure-queues://UseDevelopmentStorage")
    limit = transport.capabilities.largest_message_bytes
    assert limit == LARGEST_MESSAGE_BYTES
    headers = {"h": "x" * int((limit - 100) * share), Headers.CORRELATION_ID: "c" * 20}
    body = b"x" * (limit - size_in_bytes(encode_headers(headers), b""))
    envelope = Envelope("orders", "🕰" * 250, headers, body, NOW, NOW)
    assert len(to_text(envelope)) <= LARGEST_TEXT_BYTES


def test_what_azure_would_refuse_is_refused_before_it_is_sent() -> None:
    with pytest.raises(errors.MessageTooLarge, match=r"65,536 are allowed.*keep large content elsewhere"):
        to_text(Envelope("orders", "m", {}, b"x" * 40_000))


def _error_copy(body: bytes, stack_trace: str, **more: str) -> Envelope:
    headers = {
        "kind": "test",
        Headers.FAILED_QUEUE: "orders",
        Headers.EXCEPTION_TYPE: "ValueError",
        Headers.EXCEPTION_MESSAGE: "m" * 9_000,
        Headers.EXCEPTION_STACK_TRACE: stack_trace,
        Headers.HOST_ID: "h",
        **more,
    }
    return Envelope("error", "m", headers, body)


def test_an_error_copy_loses_its_stack_trace_before_it_is_lost() -> None:
    copy = _error_copy(b"x" * 30_000, "s" * 16_000)
    came = from_text("error", "native", to_text(copy))
    assert came.body == copy.body
    assert Headers.EXCEPTION_STACK_TRACE not in came.headers
    assert came.headers[Headers.FAILED_QUEUE] == "orders"
    assert came.headers[Headers.EXCEPTION_MESSAGE] == "m" * 1_000
    assert came.headers["kind"] == "test"


def test_a_larger_one_keeps_two_headers_about_the_failure_and_the_largest_none() -> None:
    two = from_text("error", "native", to_text(_error_copy(b"x" * 36_200, "s")))
    assert set(two.headers) == {"kind", Headers.FAILED_QUEUE, Headers.EXCEPTION_TYPE}
    none = from_text("error", "native", to_text(_error_copy(b"x" * 36_680, "s")))
    assert set(none.headers) == {"kind"}
    assert none.body == b"x" * 36_680


def test_one_that_came_without_base64_goes_without() -> None:
    text = to_text(_error_copy(b"x" * 48_000, "s"))
    assert text.startswith("{")
    assert from_text("error", "native", text).body == b"x" * 48_000


def test_a_foreign_text_of_any_size_goes_to_the_error_queue_as_it_came() -> None:
    foreign = "x" * LARGEST_TEXT_BYTES
    came = from_text("orders", "native", foreign)
    copy = Envelope("error", came.message_id, {**came.headers, Headers.FAILED_QUEUE: "orders"}, came.body)
    assert to_text(copy) == foreign


# --- errors -----------------------------------------------------------------------------------------------------------


class _Answer:
    """An answer of the service, as the SDK hands it around."""

    reason = "a reason"
    content_type = "application/xml"

    def __init__(self, status_code: int, headers: dict[str, str]) -> None:
        self.status_code, self.headers = status_code, headers

    def text(self, encoding: str | None = None) -> str:
        return ""


def _answer(status: int, code: str = "", **headers: str) -> HttpResponseError:
    return HttpResponseError("said so\nTime: now", response=_Answer(status, {"x-ms-error-code": code, **headers}))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("error", "queues", "tables"),
    [
        (_answer(403, "AuthenticationFailed"), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(401), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(404, "QueueNotFound"), errors.QueueNotFound, errors.StoreNotSetUp),
        (_answer(409, "EntityAlreadyExists"), errors.TransportError, errors.DuplicateMessage),
        (_answer(412, "UpdateConditionNotSatisfied"), errors.ClaimLost, errors.ClaimLost),
        (_answer(400, "PopReceiptMismatch"), errors.ClaimLost, errors.ClaimLost),
        (_answer(413, "RequestBodyTooLarge"), errors.MessageTooLarge, errors.MessageTooLarge),
        (_answer(400, "EntityTooLarge"), errors.MessageTooLarge, errors.MessageTooLarge),
        (_answer(503, "ServerBusy"), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(500, "OperationTimedOut"), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(429), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(200), errors.TransportUnreachable, errors.StoreUnreachable),
        (ServiceRequestError("no connection"), errors.TransportUnreachable, errors.StoreUnreachable),
        (_answer(400, "InvalidQueryParameterValue"), errors.DestinationUnavailable, None),
        (_answer(400, "InvalidXmlDocument"), errors.TransportError, errors.StoreError),
    ],
)
def test_each_answer_has_a_meaning(
    error: HttpResponseError, queues: type[errors.PostdateError], tables: type[errors.PostdateError] | None
) -> None:
    found = translate(error, QUEUES, "queue 'orders'")
    assert type(found) is queues
    assert str(found).startswith("queue 'orders'")
    assert "Time: now" not in str(found)
    if tables is not None:
        assert type(translate(error, TABLES, "table 'delays'")) is tables


def test_a_queue_that_is_being_deleted_is_worth_another_attempt() -> None:
    assert type(translate(_answer(409, "QueueBeingDeleted"), QUEUES, "q")) is errors.DestinationUnavailable


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({}, None),
        ({"Retry-After": "7"}, timedelta(seconds=7)),
        ({"x-ms-retry-after-ms": "250"}, timedelta(milliseconds=250)),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "999999999999"}, timedelta(minutes=5)),
    ],
)
def test_a_pause_that_is_asked_for_is_understood(headers: dict[str, str], pause: timedelta | None) -> None:
    error = _answer(503, "ServerBusy", **headers)
    assert retry_after(error) == pause
    assert ("asks for a pause" in str(translate(error, QUEUES, "q"))) is (pause is not None)


def test_a_missing_queue_says_what_to_type() -> None:
    said = str(translate(_answer(404, "QueueNotFound"), QUEUES, "queue 'orders'"))
    assert said == "queue 'orders' does not exist (404 QueueNotFound); create it: postdate setup --queue NAME"


def test_a_refused_key_says_what_to_look_at() -> None:
    said = str(translate(_answer(403, "AuthenticationFailed"), QUEUES, "queue 'orders' of Azure account 'shop'"))
    assert "queue 'orders' of Azure account 'shop' refuses this client (403 AuthenticationFailed)" in said
    assert "key" in said
    assert "clock" in said
