"""Sagas as users write them: a class with typed state, messages that start it, messages and timeouts that it handles.

::

    class OrderSaga(Saga[OrderState], correlated_by="order_id"):
        @started_by(PlaceOrder)
        async def place(self, message: PlaceOrder, context: HandlerContext) -> None:
            await self.request_timeout(PaymentDue(), within=timedelta(days=1))

        @handles_timeout(PaymentDue)
        async def payment_due(self, timeout: PaymentDue, context: HandlerContext) -> None:
            self.complete()

Source: specification 5 ("Sagas"), 4.10; ADR 0016.
"""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin
from uuid import UUID

import msgspec

from postdate.endpoint.message_types import type_name
from postdate.errors import ConfigurationError, InvalidMessage
from postdate.messages import check_text
from postdate.ports.endpoint import CORRELATION_LIMIT

log = logging.getLogger("postdate.sagas")

S = TypeVar("S")
M = TypeVar("M")
H = TypeVar("H", bound=Callable[..., Awaitable[None]])

_MARK = "__postdate_saga__"


class SagaRole(enum.Enum):
    """The role of a saga's method for a type of message."""

    STARTS = "started_by"
    HANDLES = "handles"
    HANDLES_REPLIES = "handles_reply"
    TIMES_OUT = "handles_timeout"


@dataclass(frozen=True, slots=True)
class SagaMethod:
    """A method of a saga, for one type of message.

    ``correlate`` returns the value of the correlation property from a message; ``None``: its attribute of that name.
    """

    role: SagaRole
    message_type: type[Any]
    correlate: Callable[[Any], object] | None
    method: str = ""


def started_by(message_type: type[M], *, correlate: Callable[[M], object] | None = None) -> Callable[[H], H]:
    """Let messages of a type start an instance; one that is there already handles them, too.

    Args:
        message_type: a dataclass or ``msgspec.Struct``.
        correlate: from a message to the value that tells instances apart: text, a whole number or a UUID. Default: its
            attribute with the name of the saga's correlation property.
    """
    return _saga_decorator(SagaMethod(SagaRole.STARTS, message_type, correlate))


def handles(message_type: type[M], *, correlate: Callable[[M], object] | None = None) -> Callable[[H], H]:
    """Handle messages of a type with the instance they belong to; see :func:`started_by`."""
    return _saga_decorator(SagaMethod(SagaRole.HANDLES, message_type, correlate))


def handles_reply(message_type: type[Any]) -> Callable[[H], H]:
    """Handle replies of a type with the instance that sent the message which is replied to.

    The reply names its instance in the headers ``NServiceBus.SagaId`` and ``NServiceBus.SagaType``, so its content is
    not looked at. One whose instance has ended, or that replies to no saga, goes to :meth:`Saga.not_found`.
    """
    return _saga_decorator(SagaMethod(SagaRole.HANDLES_REPLIES, message_type, None))


def handles_timeout(timeout_type: type[Any]) -> Callable[[H], H]:
    """Handle timeouts of a type that this saga has requested; messages of the same type do not come here."""
    return _saga_decorator(SagaMethod(SagaRole.TIMES_OUT, timeout_type, None))


def _saga_decorator(mark: SagaMethod) -> Callable[[H], H]:
    def decorate(method: H) -> H:
        if not inspect.iscoroutinefunction(method):
            raise ConfigurationError(f"{mark.role.value} is for async methods (self, message, context), not {method!r}")
        setattr(method, _MARK, (*getattr(method, _MARK, ()), mark))
        return method

    return decorate


class _Requests(Protocol):
    """Takes what a saga requests while it handles a message: see the methods of :class:`Saga`."""

    def request(self, timeout: object, within: timedelta | None, at: datetime | None) -> str: ...
    def cancel(self, timeout_id: str) -> bool: ...
    def move(self, timeout_id: str, within: timedelta | None, at: datetime | None) -> bool: ...
    def reply_to_originator(self, message: object, headers: Mapping[str, str] | None) -> str: ...
    def pending_dues(self) -> Mapping[str, datetime]: ...
    def complete(self) -> None: ...


class Saga(Generic[S]):
    """A process over several messages, which remembers what it needs from one to the next.

    Subclass it with the type of its state, a dataclass or ``msgspec.Struct`` in which everything but the correlation
    property has a default, and mark methods ``async def handle(self, message, context)`` with :func:`started_by`,
    :func:`handles`, :func:`handles_reply` and :func:`handles_timeout`. An object lives for one message; only ``state``
    is kept.

    Messages of one instance may be handled by several processes at once: a handler whose state was changed by another
    one meanwhile is undone, and runs again.

    Args of the class statement:
        correlated_by: name of the property of the state that tells instances apart; the first message sets it, and it
            stays.
        name: of the saga on the wire and in its store, up to 200 characters without a comma; default ``module.Class``.
    """

    definition: ClassVar[SagaDefinition]

    def __init__(self, saga_id: str, state: S, requests: _Requests) -> None:
        self.saga_id, self.state = saga_id, state
        self.__requests = requests

    def __init_subclass__(cls, *, correlated_by: str = "", name: str | None = None) -> None:
        super().__init_subclass__()
        if correlated_by:
            cls.definition = _definition(cls, correlated_by, name or type_name(cls))

    async def request_timeout(
        self, timeout: object, *, within: timedelta | None = None, at: datetime | None = None
    ) -> str:
        """Have ``timeout`` handled by this instance later; return its id, by which it can be cancelled or moved.

        It is kept with the state, in one transaction where store, queues and sagas share a database. Any number may be
        pending, also of one type. A timeout that comes after its instance was completed is ignored.

        Args:
            timeout: a message, or the type of one without fields that must be given.
            within: from now; zero: at once.
            at: aware; a past one comes at once.

        Raises:
            ConfigurationError: this saga has no :func:`handles_timeout` for it.
            DelayConflict: both ``within`` and ``at``.
            InvalidMessage: neither of them, or a negative span.
            InvalidTimestamp: ``at`` has no time zone.
        """
        return self.__requests.request(timeout, within, at)

    def cancel_timeout(self, timeout_id: str) -> bool:
        """Take a pending timeout back: it never comes; ``False`` when it is not pending (any more)."""
        return self.__requests.cancel(timeout_id)

    async def move_timeout(
        self, timeout_id: str, *, within: timedelta | None = None, at: datetime | None = None
    ) -> bool:
        """Give a pending timeout another time; it keeps its id. ``False`` when it is not pending (any more).

        Raises:
            DelayConflict, InvalidMessage, InvalidTimestamp: as :meth:`request_timeout`.
        """
        return self.__requests.move(timeout_id, within, at)

    async def reply_to_originator(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a message to the reply address of the message that began this instance; return its id.

        It leaves with the end of the message that is being handled. Where a saga sent the first message, its instance
        gets the reply.

        Args:
            message: see :meth:`Endpoint.send`.
            headers: of your own.

        Raises:
            InvalidMessage: the first message named no address for replies.
        """
        return self.__requests.reply_to_originator(message, headers)

    @property
    def pending_timeouts(self) -> Mapping[str, datetime]:
        """When each pending timeout is due, UTC, by its id."""
        return self.__requests.pending_dues()

    def complete(self) -> None:
        """End this instance with the message that is being handled: it is removed, and its timeouts are cancelled."""
        self.__requests.complete()

    @classmethod
    async def not_found(cls, message: object, context: Any) -> None:
        """Handle a message that belongs to no instance and starts none; by default it is only logged.

        Replies to an instance that has ended come here, too; timeouts do not.

        Args:
            message: of a type that this saga handles.
            context: a :class:`~postdate.HandlerContext`.
        """
        log.info("message %s belongs to no %s: ignored", context.message_id, cls.definition.name)


@dataclass(frozen=True, slots=True)
class SagaDefinition:
    """The definition of a saga, from its class; ``field`` is the name of the correlation property in JSON."""

    saga: type[Saga[Any]]
    name: str
    correlated_by: str
    state_type: type[Any]
    field: str
    messages: Mapping[type[Any], SagaMethod]
    timeouts: Mapping[type[Any], SagaMethod]

    def correlation_of(self, message: object, method: SagaMethod) -> tuple[object, str]:
        """Return the value by which a message finds its instance, and the same as text."""
        value = getattr(message, self.correlated_by) if method.correlate is None else method.correlate(message)
        value = _plain_value(value)
        return value, correlation_text(value, self.correlated_by, type(message).__name__)

    def new_state(self, value: object) -> Any:
        try:
            return msgspec.convert({self.field: value}, self.state_type)
        except msgspec.ValidationError as error:
            raise InvalidMessage(
                f"{value!r} cannot be {self.correlated_by} of {self.state_type.__name__}: {error}"
            ) from error


def correlation_text(value: object, name: str, owner: str) -> str:
    """Return a correlation value as text, which is not blank; of a member of an ``Enum``, its value, as on the wire."""
    value = _plain_value(value)
    if not isinstance(value, (str, int, UUID)) or isinstance(value, bool):
        raise InvalidMessage(
            f"{name} of {owner} must be text, a whole number or a UUID to find a saga by, not {type(value).__name__}"
        )
    text = str(value)
    check_text(text, f"{name} of {owner}", CORRELATION_LIMIT)
    return text


def _plain_value(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value


# --- from a class to its definition ------------------------------------------------------------------------------


def _definition(saga: type[Saga[Any]], correlated_by: str, name: str) -> SagaDefinition:
    _check_name(saga, name)
    state_type = _state_type(saga)
    field = _correlation_field(saga, state_type, correlated_by)
    methods = [
        SagaMethod(mark.role, mark.message_type, mark.correlate, attribute)
        for attribute, method in inspect.getmembers(saga, inspect.isfunction)
        for mark in getattr(method, _MARK, ())
    ]
    messages = _methods_by_type(saga, [each for each in methods if each.role is not SagaRole.TIMES_OUT])
    timeouts = _methods_by_type(saga, [each for each in methods if each.role is SagaRole.TIMES_OUT])
    if bytes in timeouts:
        raise _saga_error(saga, "a timeout is a message of a type of its own, not bytes")
    if not any(each.role is SagaRole.STARTS for each in messages.values()):
        raise _saga_error(saga, "nothing starts it; mark a method with @started_by(…)")
    for each in messages.values():
        if each.role is SagaRole.HANDLES_REPLIES or each.correlate is not None:
            continue
        if not _has_attribute(each.message_type, correlated_by):
            name = each.message_type.__name__
            reply = f", or @handles_reply({name}) if it only replies to what this saga sends"
            raise _saga_error(
                saga,
                f"{name} has no {correlated_by!r}; say how it is found: @{each.role.value}({name}, "
                f"correlate=lambda message: …){reply if each.role is SagaRole.HANDLES else ''}",
            )
    return SagaDefinition(saga, name, correlated_by, state_type, field, messages, timeouts)


def _check_name(saga: type[Saga[Any]], name: str) -> None:
    """Refuse a name that a message or a store would bring back as another one, or not take."""
    if "," in name or name != name.strip() or "\0" in name:
        raise _saga_error(
            saga,
            f"its name {name!r} has a comma, a NUL, or a blank at one end, which no header keeps; pass another, name=",
        )
    if not 0 < len(name) <= CORRELATION_LIMIT:
        raise _saga_error(
            saga, f"its name has {len(name)} characters, and stores take {CORRELATION_LIMIT}; pass a shorter one, name="
        )


def _saga_error(saga: type[Saga[Any]], reason: str) -> ConfigurationError:
    return ConfigurationError(f"saga {saga.__name__} cannot work: {reason}")


def _state_type(saga: type[Saga[Any]]) -> type[Any]:
    for each in saga.__mro__:
        for base in vars(each).get("__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Saga) and isinstance(get_args(base)[0], type):
                return get_args(base)[0]
    raise _saga_error(saga, "its state has no type; write class …(Saga[StateOfMine], correlated_by='…')")


def _correlation_field(saga: type[Saga[Any]], state_type: type[Any], correlated_by: str) -> str:
    """Return the name in JSON of the correlation property, the only one that may be without a default."""
    kind = msgspec.inspect.type_info(state_type)
    if not isinstance(kind, (msgspec.inspect.DataclassType, msgspec.inspect.StructType)):
        raise _saga_error(saga, f"its state {state_type.__name__} is neither a dataclass nor a msgspec.Struct")
    if isinstance(kind, msgspec.inspect.StructType) and kind.array_like:
        raise _saga_error(saga, f"its state {state_type.__name__} is array_like: properties are kept by their names")
    names = [each.encode_name for each in kind.fields if each.name == correlated_by]
    if not names:
        raise _saga_error(saga, f"its state {state_type.__name__} has no {correlated_by!r}")
    missing = [each.name for each in kind.fields if each.required and each.name != correlated_by]
    if missing:
        raise _saga_error(saga, f"its state {state_type.__name__} needs defaults for {', '.join(missing)}")
    return names[0]


def _methods_by_type(saga: type[Saga[Any]], methods: list[SagaMethod]) -> Mapping[type[Any], SagaMethod]:
    by_type: dict[type[Any], SagaMethod] = {}
    for each in methods:
        if each.message_type in by_type:
            raise _saga_error(
                saga,
                f"two methods take {each.message_type.__name__}: {by_type[each.message_type].method} and {each.method}",
            )
        by_type[each.message_type] = each
    return by_type


def _has_attribute(message_type: type[Any], attribute: str) -> bool:
    return hasattr(message_type, attribute) or any(
        attribute in getattr(each, "__annotations__", {}) for each in message_type.__mro__
    )
