"""Every built-in adapter keeps every promise of its port."""

from typing import Any

import pytest
from tests.conftest import STORE_SUBJECTS

from postdate.testing import Check, StoreSubject, TransportSubject, store_checks, transport_checks


def _checks_of_stores() -> list[Any]:
    return [pytest.param(name, check, id=f"{name}-{check}") for name in STORE_SUBJECTS for check in store_checks()]


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
