"""What observers tell of deliveries, of each store that has one."""

from dataclasses import replace

from postdate.ports import AdministrableStore, DeliveredMessage, Outcome
from postdate.testing import StoreSubject
from postdate.testing.store_suite.subject import NOW, SECOND, message, open_claiming


async def test_the_latest_deliveries_are_told(store_subject: StoreSubject) -> None:
    """The newest first, as far as the store keeps them, and nothing else."""
    async with open_claiming(store_subject) as store:
        look = store.observer() if isinstance(store, AdministrableStore) else None
        if look is None:
            return
        assert await look.latest_deliveries(10) == []
        await store.store_many([message(name) for name in "abc"], NOW)
        outcomes = (Outcome.DELIVERED, Outcome.DELIVERED, Outcome.EXPIRED)
        claims = await store.claim_due(NOW + SECOND, 3)
        for number, (claim, outcome) in enumerate(zip(claims, outcomes, strict=True), 1):
            await store.finish([claim], outcome, NOW + number * SECOND)
        for limit in (1, 10):
            found = await look.latest_deliveries(limit)
            expected = [DeliveredMessage(NOW + 2 * SECOND, NOW), DeliveredMessage(NOW + SECOND, NOW)][
                : min(limit, len(found))
            ]
            assert [replace(each, due=each.due or NOW) for each in found] == expected != []
