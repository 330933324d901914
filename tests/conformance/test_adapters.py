"""Every built-in adapter keeps every promise of its port."""

from typing import Any

import pytest
from tests.conftest import STORE_SUBJECTS

from postdate.testing import Check, StoreSubject, TransportSubject, store_checks, transport_checks

_ONE_LEASE, _MANY_LEASES = "AzureTableStore", "AzureTableStore-4-leases"
_OF_LEASES = {"administration", "capabilities", "claims"}
"""Topics in which a store with one lease differs from one with several."""


def _checks_of_stores() -> list[Any]:
    return [
        pytest.param(name, check, id=f"{name}-{check}", marks=_marks(name, check))
        for name in STORE_SUBJECTS
        for check in store_checks()
    ]


def _marks(name: str, check: Check[StoreSubject]) -> list[pytest.MarkDecorator]:
    if name != _ONE_LEASE or check.topic in _OF_LEASES:
        return []
    proof = f"tests/conformance/test_adapters.py::test_store[{_MANY_LEASES}-{check}]"
    return [pytest.mark.soak("says the same of a store with four leases", part="servers", proven_by=proof)]


@pytest.mark.parametrize(("store_subject", "check"), _checks_of_stores(), indirect=["store_subject"])
async def test_store(store_subject: StoreSubject, check: Check[StoreSubject]) -> None:
    await check(store_subject)


@pytest.mark.parametrize("check", transport_checks(), ids=str)
async def test_transport(check: Check[TransportSubject], transport_subject: TransportSubject) -> None:
    await check(transport_subject)


@pytest.mark.parametrize("checks", [store_checks(), transport_checks()], ids=["stores", "transports"])
def test_every_check_has_a_name_of_its_own_and_says_what_it_proves(checks: tuple[Check, ...]) -> None:
    names = [str(check) for check in checks]
    assert len(set(names)) == len(names)
    assert all(check.proves.endswith(".") for check in checks)
