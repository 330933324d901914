"""Messages that are received together: their instances are found in one query, and each is handled by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import msgspec
import pytest
from tests.saga_world import LOG, SECOND, Change, Place, World

from postdate import Envelope, Headers
from postdate.endpoint.message_types import type_name
from postdate.errors import StoreUnavailable
from postdate.ports import Correlation, SagaRecord

of_files = pytest.mark.parametrize("world", ["file", "file-receive_only", "file-outbox"], indirect=True)


class Asked:
    """What the store is asked for, one by one and together."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.one, self.many = list[str](), list[list[str]]()
        self.error: Exception | None = None
        find, find_all = world.sagas.find, world.sagas.find_all

        async def found(saga_type: str, correlation: Correlation) -> SagaRecord | None:
            self.one.append(correlation.value)
            return await find(saga_type, correlation)

        async def all_found(saga_type: str, correlations: Sequence[Correlation]) -> Sequence[SagaRecord | None] | None:
            self.many.append([each.value for each in correlations])
            if self.error is not None:
                raise self.error
            return await find_all(saga_type, correlations)

        monkeypatch.setattr(world.sagas, "find", found)
        monkeypatch.setattr(world.sagas, "find_all", all_found)


async def queue(
    world: World,
    *messages: Place | Change | bytes,
    ids: Sequence[str] = (),
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put messages into the queue of the endpoint, to be received together; bytes are the body of a ``Place``."""
    await world.transport.create_queues(["orders"])
    envelopes = list[Envelope]()
    for number, message in enumerate(messages):
        id_, kind = ids[number] if ids else f"m-{number}", Place if isinstance(message, bytes) else type(message)
        body = message if isinstance(message, bytes) else msgspec.json.encode(asdict(message))
        own = {Headers.MESSAGE_ID: id_, Headers.ENCLOSED_MESSAGE_TYPES: type_name(kind), **headers}
        envelopes.append(Envelope("orders", id_, own, body))
    await world.transport.send(envelopes, world.clock.now())


@of_files
async def test_instances_are_found_in_one_query_those_of_a_second_message_by_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(world, monkeypatch)
    await queue(world, *(Place(f"o-{number % 9}") for number in range(10)), Change("none"))
    async with world.endpoint():
        await world.clock.run_until_idle()
    assert asked.many == [[*(f"o-{number}" for number in range(9)), "none"]]
    assert set(asked.one) == {"o-0", "none"}, "before a message is ignored its instance is looked for afresh"
    assert ("not found", "Change", "") in LOG
    assert await world.seen("o-0") == ["Place", "Place"]
    assert [await world.seen(f"o-{number}") for number in range(1, 9)] == [["Place"]] * 8


@of_files
@pytest.mark.parametrize("expired", [True, False])
async def test_of_messages_that_are_not_handled_nothing_is_remembered(world: World, *, expired: bool) -> None:
    """Expired ones, and with an outbox those that were handled before."""
    headers = {Headers.EXPIRES_AT: "2020-01-01 00:00:00:000000 Z"} if expired else {}
    async with world.endpoint() as endpoint:
        for _ in range(2):
            await queue(world, *(Place(f"o-{number}") for number in range(3)), headers=headers)
            await world.clock.advance(SECOND)
        handlers = endpoint._handlers
        assert handlers.sagas is not None
        assert not handlers._preloaded
        assert not handlers.sagas._preloaded
    assert await world.length("orders") == 0


@of_files
async def test_what_cannot_be_found_together_is_found_for_each(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(world, monkeypatch)
    asked.error = StoreUnavailable("now")
    await queue(world, *(Place(f"o-{number}") for number in range(3)))
    async with world.endpoint():
        await world.clock.run_until_idle()
    assert (len(asked.many), sorted(asked.one)) == (1, ["o-0", "o-1", "o-2"])
    assert [await world.seen(f"o-{number}") for number in range(3)] == [["Place"]] * 3


@of_files
async def test_one_at_a_time_a_message_finds_what_the_one_before_it_has_left(world: World) -> None:
    await queue(world, Place("o-0"), Change("o-0"), Change("o-0", ["complete"]), Place("o-0"), Change("o-0"))
    async with world.endpoint(concurrency=1):
        await world.clock.run_until_idle()
    assert await world.seen("o-0") == ["Place", "Change"]


@of_files
async def test_an_instance_that_ends_as_it_begins_is_looked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written that would tell of another, made after the two were looked for."""
    asked = Asked(world, monkeypatch)
    await queue(world, Place("o-0", ["complete"]), Place("o-1"))
    async with world.endpoint():
        await world.clock.run_until_idle()
    assert (asked.many, asked.one) == ([["o-0", "o-1"]], ["o-0"])
    assert [await world.seen(f"o-{number}") for number in range(2)] == [None, ["Place"]]


@of_files
async def test_what_cannot_be_read_fails_alone(world: World) -> None:
    await queue(world, Place("o-0"), b"{", Place(" "), Place("o-1"))
    async with world.endpoint():
        await world.clock.advance(SECOND)
        assert await world.length("error") == 2
    assert [await world.seen(f"o-{number}") for number in range(2)] == [["Place"]] * 2


@pytest.mark.parametrize("world", ["file", "file-receive_only"], indirect=True)
async def test_messages_of_one_id_are_not_taken_for_each_other(world: World) -> None:
    """An id is whatever a sender writes."""
    await queue(world, Place("o-0"), Place("o-1"), ids=["same", "same"])
    async with world.endpoint():
        await world.clock.run_until_idle()
    assert [await world.seen(f"o-{number}") for number in range(2)] == [["Place"]] * 2
