"""The edge to COM: what it asks of pywin32, and what it says where there is none."""

import platform
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from postdate.backends.msmq.com import MESSAGE, PyWin32, code_of, translate
from postdate.backends.msmq.transport import MsmqTransport
from postdate.errors import (
    ConfigurationError,
    DestinationUnavailable,
    QueueNotFound,
    TransportError,
    TransportUnreachable,
)
from postdate.wiring import check_transport, open_transport


@pytest.fixture
def no_pywin32(monkeypatch):
    for module in ("pythoncom", "pywintypes", "win32com", "win32com.client", "win32com.client.dynamic"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(platform, "system", lambda: "Linux")


@pytest.fixture
def asked(monkeypatch):
    """Put modules in the place of those of pywin32; return what they were asked."""
    calls = []
    pythoncom, pywintypes = ModuleType("pythoncom"), ModuleType("pywintypes")
    win32com, client, dynamic = ModuleType("win32com"), ModuleType("client"), ModuleType("dynamic")
    pythoncom.__dict__.update(
        CoInitialize=lambda: calls.append("CoInitialize"),
        CoUninitialize=lambda: calls.append("CoUninitialize"),
        VT_ARRAY=0x2000,
        VT_UI1=0x11,
    )
    pywintypes.__dict__["com_error"] = type("com_error", (Exception,), {})
    client.__dict__["VARIANT"] = lambda kind, value: calls.append((kind, value)) or "variant"
    dynamic.__dict__["Dispatch"] = lambda prog_id: calls.append(prog_id) or SimpleNamespace()
    win32com.__dict__["client"] = client
    modules = {"pythoncom": pythoncom, "pywintypes": pywintypes, "win32com": win32com, "win32com.client": client}
    for name, module in {**modules, "win32com.client.dynamic": dynamic}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.usefixtures("no_pywin32")
@pytest.mark.parametrize("make", [MsmqTransport, open_transport])
@pytest.mark.parametrize("address", ["msmq:", "msmq://SALES1"])
def test_where_there_is_no_msmq_it_is_said_what_is_needed(make, address):
    with pytest.raises(ConfigurationError) as caught:
        make(address)
    for said in ("needs Windows", "pip install 'postdate[msmq]'", "this machine runs Linux"):
        assert said in str(caught.value)


@pytest.mark.parametrize("address", ["msmq:", "MSMQ:", "msmq://SALES1"])
def test_the_scheme_means_msmq(address):
    kind = check_transport(address)
    assert (kind.product, kind.backend.extra) == ("MSMQ", "msmq")


def test_settings_reach_the_transport_and_others_are_refused(asked):
    transport = open_transport("msmq:", transactional=False, use_journal_queue=True)
    assert repr(transport) == "MsmqTransport('.', transactional=False)"
    with pytest.raises(ConfigurationError, match="MSMQ takes no queue_type"):
        open_transport("msmq:", queue_type="quorum")
    with pytest.raises(ConfigurationError, match="largest_message_bytes must be from 1 to 4,186,112"):
        open_transport("msmq:", largest_message_bytes=5_000_000)
    assert asked == []  # nothing is made before it is used


def test_com_is_asked_in_words_of_pywin32(asked):
    com = PyWin32()
    com.initialize()
    com.create(MESSAGE)
    assert com.byte_array(b"\0a") == "variant"
    com.uninitialize()
    assert asked == ["CoInitialize", "MSMQ.MSMQMessage", (0x2011, b"\0a"), "CoUninitialize"]
    assert com.errors.__name__ == "com_error"
    assert com.machine == platform.node()


def test_the_workflow_for_windows_runs_tests_that_are_there():
    root = Path(__file__).parents[2]
    named = re.findall(r"tests/[\w/]+\.py", (root / ".github" / "workflows" / "msmq.yml").read_text(encoding="utf-8"))
    unit = {f"tests/unit/{path.name}" for path in (root / "tests" / "unit").glob("test_msmq*.py")}
    assert set(named) == {"tests/conformance/test_msmq.py", *unit}


# --- errors -----------------------------------------------------------------------------------------------------------


def error(code, inside=None, strerror="Exception occurred."):
    def signed(value):
        return value - (1 << 32)

    details = None if inside is None else (0, "MSMQ", "The words of MSMQ.", None, 0, signed(inside))
    return SimpleNamespace(hresult=signed(code), excepinfo=details, strerror=strerror)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0xC00E0003, QueueNotFound),
        (0xC00E001E, QueueNotFound),
        (0xC00E005A, QueueNotFound),
        (0xC00E000B, TransportUnreachable),
        (0xC00E0056, TransportUnreachable),
        (0x800706BA, TransportUnreachable),
        (0xC00E0027, DestinationUnavailable),
        (0xC00E001B, DestinationUnavailable),
        (0xC00E0025, DestinationUnavailable),
        (0xC00E0050, DestinationUnavailable),
        (0xC00E00FF, DestinationUnavailable),
        (0xC00E0018, TransportError),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_each_code_has_a_meaning_wrapped_by_automation_or_not(code, kind, wrapped):
    met = error(0x80020009, inside=code) if wrapped else error(code)
    translated = translate(met, "orders@HERE1")  # pyright: ignore[reportArgumentType] - as much of it as is read
    assert type(translated) is kind
    for said in ("orders@HERE1", f"0x{code:08X}", "The words of MSMQ" if wrapped else "Exception occurred"):
        assert said in str(translated)


def test_any_other_exception_has_no_code():
    assert code_of(ValueError("x")) == 0
    assert "x, 0x00000000" in str(translate(ValueError("x"), "orders@HERE1"))
