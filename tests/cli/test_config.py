"""Settings: where they come from, and what is said when they are wrong."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.config import Address, format_duration, load_settings, parse_duration, parse_instant
from postdate.errors import ConfigurationError, InvalidTimestamp, UnknownSetting
from postdate.ports import Recording, TransactionMode


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("1.5", 1.5),
        ("30s", 30),
        ("1m30s", 90),
        ("1m 30s", 90),
        ("2h", 7200),
        ("1d12h", 129_600),
        ("2w", 1_209_600),
        ("250ms", 0.25),
        ("7us", 0.000_007),
        ("0.000001s", 0.000_001),
        ("10M", 600),
    ],
)
def test_a_duration_is_read_as_it_is_written(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "10x", "-5s", "1h1h", "s10", "1:30", "one minute", "1e3", "٣s", "99999999999w"]
)
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(InvalidTimestamp, match=r"not a duration; write a number with a unit|too long"):
        parse_duration(text)


@given(st.timedeltas(min_value=timedelta(0)))
def test_a_duration_survives_being_written_and_read(duration):
    assert parse_duration(format_duration(duration)) == duration


def test_an_instant_is_read_with_any_offset():
    noon_in_paris = datetime(2026, 1, 31, 11, tzinfo=UTC)
    assert parse_instant("2026-01-31T12:00+01:00") == noon_in_paris
    assert parse_instant("2026-01-31T11:00:00Z") == noon_in_paris
    assert parse_instant("2026-01-31 11:00:00.000001Z") == noon_in_paris + timedelta(microseconds=1)


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00", "2026-01-31", "tomorrow", "", "2026-02-30T00:00Z", "0001-01-01T00:00+01:00"]
)
def test_an_instant_that_is_not_clear_is_refused(text):
    with pytest.raises(InvalidTimestamp):
        parse_instant(text)


# --- origins ------------------------------------------------------------------------------------------------------


def test_without_anything_the_defaults_hold():
    settings = load_settings(None, {})
    assert settings.endpoint.name == "postdate"
    assert settings.store.address == "sqlite:///postdate.db"
    assert settings.transport.address == "local:///postdate.db"
    assert settings.delayed_delivery.number_of_retries == 0
    assert {row.origin for row in settings.rows()} == {"default"}


def test_option_beats_environment_beats_file_beats_default(own_folder):
    (own_folder / "postdate.toml").write_text('[store]\nsynchronous = "normal"\naddress = "sqlite:///file.db"\n')
    environment = {"POSTDATE_STORE__ADDRESS": "sqlite:///environment.db", "POSTDATE_QUEUES__CREATE": "a, b"}
    settings = load_settings(None, environment, {"store.address": "sqlite:///option.db", "transport.address": None})
    assert settings.store.address == "sqlite:///option.db"
    assert settings.store.synchronous == "normal"
    assert settings.queues.create == ("a", "b")
    assert settings.origins["store.address"] == "option --store"
    assert settings.origins["store.synchronous"] == "postdate.toml:2"
    assert settings.origins["queues.create"] == "environment POSTDATE_QUEUES__CREATE"


def test_every_setting_can_come_from_the_file(own_folder):
    (own_folder / "other.toml").write_text(
        '[endpoint]\nname = "billing"\nerror_queue = "failed"\ntransaction_mode = "receive_only"\nconcurrency = 4\n'
        '[store]\nrecording = "outcomes"\nlargest_message_bytes = 1000\n'
        '[delayed_delivery]\nnumber_of_retries = 3\ntime_to_trigger_fetch_circuit_breaker = "1m30s"\n'
        "time_to_trigger_store_circuit_breaker = 2.5\n"
        '[queues]\ncreate = ["orders"]\n'
    )
    settings = load_settings("other.toml", {})
    assert settings.endpoint.transaction_mode is TransactionMode.RECEIVE_ONLY
    assert settings.store.recording is Recording.OUTCOMES
    assert settings.delayed_delivery.time_to_trigger_fetch_circuit_breaker == timedelta(seconds=90)
    assert settings.delayed_delivery.time_to_trigger_store_circuit_breaker == timedelta(seconds=2.5)
    assert settings.queues.create == ("orders",)
    assert str(settings.file) == "other.toml"


@pytest.mark.parametrize(
    ("option", "store", "transport"),
    [
        ({"store.address": "sqlite:///a.db"}, "sqlite:///a.db", "local:///a.db"),
        ({"transport.address": "local:///b.db"}, "sqlite:///b.db", "local:///b.db"),
        ({"store.address": "sqlite:///a.db", "transport.address": "local:///b.db"}, "sqlite:///a.db", "local:///b.db"),
    ],
)
def test_store_and_queues_share_a_file_unless_told_otherwise(option, store, transport):
    settings = load_settings(None, {}, option)
    assert (settings.store.address, settings.transport.address) == (store, transport)


def test_a_value_from_the_environment_is_as_good_as_one_from_the_file(cli, monkeypatch):
    monkeypatch.setenv("POSTDATE_ENDPOINT__NAME", "billing")
    monkeypatch.setenv("POSTDATE_QUEUES__CREATE", "orders")
    cli.ok("setup")
    cli.ok("send", "orders", "x", "--delay", "1h")
    settings = load_settings(None, {"POSTDATE_ENDPOINT__NAME": "billing", "POSTDATE_QUEUES__CREATE": "orders"})
    assert {type(settings.endpoint.name), *map(type, settings.queues.create)} == {str}


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[store]\nadress = "x:y"', "'adress' in section [store] (postdate.toml:2); did you mean store.address?"),
        ("[stoer]", "no section [stoer] (postdate.toml:1); did you mean [store]?"),
        ('[delayed_delivery]\npoison_que = "x"', "did you mean delayed_delivery.poison_queue"),
        ("[store]\npage_sise = 4", "did you mean store.page_size"),
        ('[transport]\nsanitiser = "legacy"', "did you mean transport.sanitizer"),
        ("[zzz]", "there are [endpoint], [store], [transport], [delayed_delivery], [timeout_manager]"),
        ("[queues]\nzzz = 1", "there are queues.create"),
    ],
)
def test_an_unknown_setting_is_an_error_that_says_what_may_have_been_meant(own_folder, text, said):
    (own_folder / "postdate.toml").write_text(text)
    with pytest.raises(UnknownSetting) as caught:
        load_settings(None, {})
    assert said in str(caught.value)


@pytest.mark.parametrize("variable", ["POSTDATE_STORE__ADRESS", "POSTDATE_STORE_ADDRESS", "POSTDATE_STROE__ADDRESS"])
def test_an_unknown_variable_is_an_error(variable):
    with pytest.raises(UnknownSetting, match=f"no variable {variable} .*did you mean POSTDATE_STORE__ADDRESS"):
        load_settings(None, {variable: "x"})


def test_variables_that_a_platform_sets_by_itself_are_no_error():
    load_settings(None, {"POSTDATE_SERVICE_HOST": "10.0.0.1", "POSTDATE_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[store]\nsynchronous = "fulll"', "store.synchronous must be one of full, normal (did you mean 'full'?)"),
        ("[endpoint]\nconcurrency = 0", "endpoint.concurrency must be a whole number, 1 or more, not 0"),
        ("[endpoint]\nconcurrency = true", "must be a whole number, 1 or more, not true"),
        ('[endpoint]\nconcurrency = "4"', 'must be a whole number, 1 or more, not "4"'),
        ('[endpoint]\nname = " "', "endpoint.name must be the name of a queue"),
        ("[endpoint]\nname = 7", "endpoint.name must be the name of a queue"),
        ('[endpoint]\ntransaction_mode = "exactly_once"', "must be one of none, receive_only"),
        ('[queues]\ncreate = "orders"', "queues.create must be a list of queue names"),
        ("[queues]\ncreate = [1]", "queues.create must be the name of a queue"),
        ('[store]\naddress = "postdate.db"', "store.address must be an address such as sqlite:///postdate.db"),
        ("[delayed_delivery]\ntime_to_trigger_store_circuit_breaker = 0", "must be a duration above zero"),
        ('[delayed_delivery]\ntime_to_trigger_store_circuit_breaker = "soon"', "must be a duration: 'soon'"),
        ("[store]\npage_size = 0", "store.page_size must be a whole number, 1 to 1,000, not 0"),
        ('[store]\nlongest_wait_when_idle = "2m"', "longest_wait_when_idle must be a duration of 100ms to 1m, not"),
        ("[transport]\nhold_for = 1.5", "hold_for must be a duration of 1s to 7d, in steps of 1s, not 1.5"),
        ("[transport]\nconcurrent_sends = 0", "concurrent_sends must be a whole number, 1 or more, not 0"),
        ('[transport]\nsanitizer = "dash"', "must be one of dashes, strict, legacy (did you mean 'dashes'?)"),
        ('[delayed_delivery]\nerrors_return_to = "error"', "must be one of timeouts_queue, destination"),
        ('[delayed_delivery]\npoison_queue = ""', "delayed_delivery.poison_queue must be the name of a queue"),
        ('[delayed_delivery]\ndrain_timeout_manager = "yes"', "drain_timeout_manager must be true or false"),
        ("store = 1", "store must be a section"),
        ("[store", "is not TOML"),
    ],
)
def test_a_wrong_value_is_an_error_that_says_where_it_stands(own_folder, text, said):
    (own_folder / "postdate.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, {})
    assert said in str(caught.value)
    assert "postdate.toml" in str(caught.value)


def test_a_wrong_number_in_the_environment_is_named():
    with pytest.raises(ConfigurationError, match=r'not "many" \(environment POSTDATE_ENDPOINT__CONCURRENCY\)'):
        load_settings(None, {"POSTDATE_ENDPOINT__CONCURRENCY": "many"})
    assert load_settings(None, {"POSTDATE_ENDPOINT__CONCURRENCY": "4"}).endpoint.concurrency == 4


@pytest.mark.parametrize(("file", "environment"), [("nix.toml", {}), (None, {"POSTDATE_CONFIG": "nix.toml"})])
def test_a_file_that_was_named_and_is_missing_is_an_error(file, environment):
    with pytest.raises(ConfigurationError, match=r"no file 'nix\.toml'"):
        load_settings(file, environment)


def test_a_file_that_is_not_text_is_an_error(own_folder):
    (own_folder / "postdate.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        load_settings(None, {})


# --- secrets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("sqlite:///postdate.db", "sqlite:///postdate.db"),
        ("postgres://me:s3/cr@et@host/db", "postgres://***"),
        ("postgres://me@host/db", "postgres://me@host/db"),
        ("postgres://host/db?password=s3cret&sslmode=on", "postgres://host/db?password=***&sslmode=on"),
        ("azure:AccountName=a;AccountKey=s3cret;Sig=x", "azure:AccountName=a;AccountKey=***;Sig=***"),
    ],
)
def test_secrets_are_hidden_wherever_an_address_is_shown(address, shown):
    assert Address(address).redacted_text == shown
    assert repr(Address(address)) == repr(shown)
    settings = load_settings(None, {"POSTDATE_STORE__ADDRESS": address})
    assert settings.store.address == address
    assert "s3" not in repr(settings)
    assert [row.value for row in settings.rows() if row.key == "store.address"] == [shown]
