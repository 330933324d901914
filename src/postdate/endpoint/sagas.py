"""The base class of sagas: classes with a typed state and methods for messages and timeouts.

::

    class OrderSaga(Saga[OrderState], correlated_by="order_id"):
        @started_by(PlaceOrder)
        async def place(self, message: PlaceOrder, context: HandlerContext) -> None:
            await self.request_timeout(PaymentDue(), within=timedelta(days=1))

        @handles_timeout(PaymentDue)
        async def payment_due(self, timeout: PaymentDue, context: HandlerContext) -> None:
            self.complete()

Source: ADR 0016; docs/guides/sagas.md.
"""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Callable, Mapping
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
C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", bound=Callable[..., Any])

# A decorator checks that its method takes such messages. It returns a method that takes any, because another decorator
# may name another type that the method takes, too.

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


def started_by(
    message_type: type[M], *, correlate: Callable[[M], object] | None = None
) -> Callable[[Callable[[T, M, C], R]], Callable[[T, Any, C], R]]:
    """Let messages of a type start an instance. An instance that exists already handles them, too.

    Args:
        message_type: a dataclass or ``msgspec.Struct``.
        correlate: a function that returns the correlation value of a message: text, a whole number or a UUID. Default:
            the attribute of the message with the name of the saga's correlation property.
    """
    return _saga_decorator(SagaMethod(SagaRole.STARTS, message_type, correlate))


def handles(
    message_type: type[M], *, correlate: Callable[[M], object] | None = None
) -> Callable[[Callable[[T, M, C], R]], Callable[[T, Any, C], R]]:
    """Handle messages of a type with their instance; see :func:`started_by`."""
    return _saga_decorator(SagaMethod(SagaRole.HANDLES, message_type, correlate))


def handles_reply(message_type: type[M]) -> Callable[[Callable[[T, M, C], R]], Callable[[T, Any, C], R]]:
    """Handle replies of a type with the instance that sent the original message.

    A reply names its instance in the headers ``NServiceBus.SagaId`` and ``NServiceBus.SagaType``; its content does not
    matter. A reply to a completed instance, or to no saga, goes to :meth:`Saga.not_found`.
    """
    return _saga_decorator(SagaMethod(SagaRole.HANDLES_REPLIES, message_type, None))


def handles_timeout(timeout_type: type[M]) -> Callable[[Callable[[T, M, C], R]], Callable[[T, Any, C], R]]:
    """Handle timeouts of a type that this saga has requested, and no other messages of the type."""
    return _saga_decorator(SagaMethod(SagaRole.TIMES_OUT, timeout_type, None))


def _saga_decorator(mark: SagaMethod) -> Callable[[H], H]:
    def decorate(method: H) -> H:
        if not inspect.iscoroutinefunction(method):
            raise ConfigurationError(f"{mark.role.value} is for async methods (self, message, context), not {method!r}")
        setattr(method, _MARK, (*getattr(method, _MARK, ()), mark))
        return method

    return decorate


class _Requests(Protocol):
    """The receiver of the requests that a saga makes while it handles a message: see the methods of :class:`Saga`."""

    def request(self, timeout: object, within: timedelta | None, at: datetime | None) -> str: ...
    def cancel(self, timeout_id: str) -> bool: ...
    def move(self, timeout_id: str, within: timedelta | None, at: datetime | None) -> bool: ...
    def reply_to_originator(self, message: object, headers: Mapping[str, str] | None) -> str: ...
    def pending_dues(self) -> Mapping[str, datetime]: ...
    def complete(self) -> None: ...


class Saga(Generic[S]):
    """A long-running process with state: it handles several messages, and keeps its state between them.

    Subclass it with the type of its state, a dataclass or ``msgspec.Struct`` in which all fields except the correlation
    property have defaults. Mark methods ``async def handle(self, message, context)`` with :func:`started_by`,
    :func:`handles`, :func:`handles_reply` and :func:`handles_timeout`. An object exists for one message; only ``state``
    is stored.

    Messages of one instance may be handled by several processes at once. If another process has changed the state
    meanwhile, a handler is undone, and runs again.

    Args of the class statement:
        correlated_by: name of the correlation property of the state. The first message sets it, and it never changes.
        name: name of the saga on the wire and in its store, up to 200 characters without a comma. Default:
            ``module.Class``.
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
        """Request a timeout, which this instance handles later; return its id, with which it can be cancelled or moved.

        The timeout is stored with the state, in one transaction if store, queues and sagas share a database. Any number
        of timeouts may be pending, also of one type. A timeout that arrives after its instance was completed is
        ignored.

        Args:
            timeout: a message, or a message type whose fields all have defaults.
            within: the time from now; zero: at once.
            at: the instant; aware. With a past instant, the timeout is delivered at once.

        Raises:
            ConfigurationError: this saga has no :func:`handles_timeout` for it.
            DelayConflict: both ``within`` and ``at``.
            InvalidMessage: neither of them, or a negative span.
            InvalidTimestamp: ``at`` has no time zone.
        """
        return self.__requests.request(timeout, within, at)

    def cancel_timeout(self, timeout_id: str) -> bool:
        """Cancel a pending timeout, so that it is never delivered; return ``False`` if it is not pending."""
        return self.__requests.cancel(timeout_id)

    async def move_timeout(
        self, timeout_id: str, *, within: timedelta | None = None, at: datetime | None = None
    ) -> bool:
        """Change the time of a pending timeout, which keeps its id; return ``False`` if it is not pending.

        Raises:
            DelayConflict, InvalidMessage, InvalidTimestamp: as :meth:`request_timeout`.
        """
        return self.__requests.move(timeout_id, within, at)

    async def reply_to_originator(self, message: object, headers: Mapping[str, str] | None = None) -> str:
        """Send a message to the reply address of the message that started this instance; return its id.

        It is sent when the message that is being handled is completed. If a saga sent the first message, the instance
        of that saga gets the reply.

        Args:
            message: see :meth:`Endpoint.send`.
            headers: headers of the application.

        Raises:
            InvalidMessage: the first message has no address for replies.
        """
        return self.__requests.reply_to_originator(message, headers)

    @property
    def pending_timeouts(self) -> Mapping[str, datetime]:
        """The due times of pending timeouts, UTC, by the ids of the timeouts."""
        return self.__requests.pending_dues()

    def complete(self) -> None:
        """Complete this instance with the message that is being handled: remove it, and cancel its timeouts."""
        self.__requests.complete()

    @classmethod
    async def not_found(cls, message: object, context: Any) -> None:
        """Handle a message that belongs to no instance and starts none. By default it is only logged.

        Replies to a completed instance are handled here, too; timeouts are not.

        Args:
            message: a message of a type that this saga handles.
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
    """Return a correlation value as text, which is not blank. A member of an ``Enum`` is replaced by its value."""
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
        raise _saga_error(saga, "a timeout must be a message with a type of its own, not bytes")
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
    """Raise an error for a name that a header or a store would change or refuse."""
    if "," in name or name != name.strip() or "\0" in name:
        raise _saga_error(
            saga,
            f"its name {name!r} has a comma, a NUL, or a blank at one end, which a header cannot contain; pass "
            f"another name with name=",
        )
    if not 0 < len(name) <= CORRELATION_LIMIT:
        raise _saga_error(
            saga,
            f"its name has {len(name)} characters, and stores allow {CORRELATION_LIMIT}; pass a shorter name "
            f"with name=",
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
    """Return the name in JSON of the correlation property, the only property that may have no default."""
    kind = msgspec.inspect.type_info(state_type)
    if not isinstance(kind, (msgspec.inspect.DataclassType, msgspec.inspect.StructType)):
        raise _saga_error(saga, f"its state {state_type.__name__} is neither a dataclass nor a msgspec.Struct")
    if isinstance(kind, msgspec.inspect.StructType) and kind.array_like:
        raise _saga_error(
            saga, f"its state {state_type.__name__} must not be array_like: properties are stored by their names"
        )
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
                f"two methods handle {each.message_type.__name__}: {by_type[each.message_type].method} and "
                f"{each.method}",
            )
        by_type[each.message_type] = each
    return by_type


def _has_attribute(message_type: type[Any], attribute: str) -> bool:
    return hasattr(message_type, attribute) or any(
        attribute in getattr(each, "__annotations__", {}) for each in message_type.__mro__
    )
