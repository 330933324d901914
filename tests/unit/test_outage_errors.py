"""The documented errors of each server: an error counts against a message only where it is about data (ADR 50).

Everything else is an outage, and so is an error that no list names. Sources: PostgreSQL, appendix A (error codes);
MariaDB, "MariaDB Error Codes"; SQL Server, "Database engine errors" and Azure SQL's lists of transient errors; Redis,
"Redis serialization protocol" and the texts of its errors; Azure Storage, "Common / Queue service / Table service error
codes"; AMQP 0-9-1, reply codes; MSMQ, "Message Queuing error and information codes".
"""

from types import SimpleNamespace
from typing import Any

import psycopg
import pymysql
import pytest
from azure.core.exceptions import HttpResponseError
from redis import exceptions as redis_errors

from postdate.backends.azure.errors import QUEUES as AZURE_QUEUES
from postdate.backends.azure.errors import TABLES as AZURE_TABLES
from postdate.backends.azure.errors import translate as translate_azure
from postdate.backends.mariadb.connection import translate as translate_mariadb
from postdate.backends.msmq.com import translate as translate_msmq
from postdate.backends.postgres.errors import translate as translate_postgres
from postdate.backends.rabbitmq.connection import ChannelClosed
from postdate.backends.rabbitmq.publisher import _refusal
from postdate.backends.redis.server import QUEUES as REDIS_QUEUES
from postdate.backends.redis.server import STORE as REDIS_STORE
from postdate.backends.redis.server import translate as translate_redis
from postdate.backends.sqlserver.connection import translate as translate_sqlserver
from postdate.errors import MessageTooLarge, PostdateError, QueueNotFound


def assert_outages(outages: dict[Any, PostdateError], about_data: dict[Any, PostdateError]) -> None:
    assert [key for key, error in outages.items() if not error.outage] == []
    assert [key for key, error in about_data.items() if error.outage] == []


# --- PostgreSQL: all 250 codes that the driver knows ------------------------------------------------------------------

POSTGRES_DATA_CLASSES = {"09", "21", "22", "23", "25", "27", "38", "39", "44", "54", "P0"}
POSTGRES_OUTAGES_IN_THEM = {
    "22012",  # the division by zero by which a move reports that a row changed meanwhile
    "25006",  # read-only
    "25P03",  # idle in a transaction for longer than the server allows
    "25P04",  # a transaction longer than the server allows
}


def test_postgresql_counts_data_errors_only() -> None:
    states = {
        state
        for name in dir(psycopg.errors)
        if isinstance(state := getattr(vars(psycopg.errors)[name], "__dict__", {}).get("sqlstate"), str)
    }
    assert len(states) > 240
    states |= {"08P99", "57P99", "99999", "0A000", "26000", "42P05"}  # of next year's version; cached plans, poolers
    about_data = {each for each in states if each[:2] in POSTGRES_DATA_CLASSES} - POSTGRES_OUTAGES_IN_THEM

    def translated(state: str) -> PostdateError:
        error = psycopg.Error("said by the server")
        error.sqlstate = state
        return translate_postgres(error, "PostgreSQL here")

    assert_outages(
        {each: translated(each) for each in states - about_data}, {each: translated(each) for each in about_data}
    )


@pytest.mark.parametrize("kind", [psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError])
def test_what_psycopg_says_of_the_connection_is_an_outage(kind: type[psycopg.Error]) -> None:
    assert translate_postgres(kind("the connection is closed"), "PostgreSQL here").outage


@pytest.mark.parametrize("kind", [psycopg.DataError, psycopg.ProgrammingError])
def test_what_psycopg_says_of_a_value_is_no_outage(kind: type[psycopg.Error]) -> None:
    assert not translate_postgres(kind("cannot contain NUL (0x00) bytes"), "PostgreSQL here").outage


# --- MariaDB ----------------------------------------------------------------------------------------------------------

MARIADB_OUTAGES = {
    "08": "1040 1041 1042 1043 1047 1053 1152 1158 1159 1160 1161 1184 1189 1190",
    "HY": """
        1005 1006 1010 1015 1016 1017 1020 1021 1023 1024 1026 1028 1030 1033 1034 1036 1037 1038 1077 1079 1080
        1105 1114 1126 1127 1129 1130 1150 1180 1181 1182 1194 1195 1196 1198 1199 1201 1205 1206 1207 1223 1236
        1257 1290 1296 1297 1317 1436 1467 1478 1548 1593 1602 1613 1614 1615 1694 1696 1715 1729 1785 1792 1836
        1871 1873 1880 1888 1906 1907 1927 1945 1969 4031 4047
    """,
    "42": "1044 1049 1051 1054 1064 1142 1143 1146 1203 1226 1227 1305 1370 1461",
    "28": "1045 1698",
    "40": "1213 1613",
    "70": "1317 1927 1968",
    "25": "1179 1207 1792",
    "0A": "1235 1295",
    "XA": "1397 1398 1399 1402 1613",
    "": "2002 2003 2006 2013 2014 2027 2055 4999",
}
MARIADB_DATA = {
    "22": "1264 1292 1406 1365 1690 3140",
    "23": "1048 1169 1216 1217 1451 1452 4025",
    "21": "1136 1242",
    "44": "1369",
    "45": "1644 30001",
    "HY": "1197 1267 1270 1271 1300 1364 1366 1526 1705 1713",
    "42": "1118",
    "08": "1153",
}


def test_mariadb_counts_data_errors_only() -> None:
    def translated(state: str, number: int) -> PostdateError:
        error = pymysql.err.OperationalError(number, "said by the server", sqlstate=f"{state}000" if state else None)
        return translate_mariadb(error, "MariaDB here")

    outages, about_data = (
        {
            (state, number): translated(state, number)
            for state, numbers in errors.items()
            for number in map(int, numbers.split())
        }
        for errors in (MARIADB_OUTAGES, MARIADB_DATA)
    )
    assert_outages(outages, about_data)


# --- SQL Server -------------------------------------------------------------------------------------------------------

SQLSERVER_OUTAGES = """
    -2 -1 2 19 20 26 40 53 64 102 121 156 201 207 208 229 230 233 258 262 297 300 596 601 605 614 615 617 669
    671 701 802 823 824 825 832 845 905 911 916 921 922 924 926 927 945 952 954 955 976 978 979 981 982 983 997
    1101 1105 1203 1204 1205 1206 1220 1221 1222 1421 1807 1814 1934 2760 2801 2812 3257 3626 3635 3902 3903
    3906 3908 3928 3935 3941 3950 3960 3961 3966 3980 3989 4014 4060 4186 4221 4902 5054 5061 5132 5149 5901
    5904 6005 6006 6102 8623 8628 8645 8650 8651 8902 8992 9001 9002 9100 9515 10050 10053 10054 10060 10061
    10065 10922 10928 10929 10930 10936 11001 14355 14906 15247 15404 17053 17142 17143 17147 17187 17188 17189
    17191 17197 17204 17207 17300 17308 17310 17312 17806 17830 17884 17888 17889 18401 18451 18452 18456 18461
    18470 18486 18487 18488 18842 20041 22335 22358 22380 22498 35202 40020 40106 40143 40166 40189 40197 40501
    40508 40515 40531 40532 40540 40544 40545 40549 40550 40551 40552 40553 40602 40613 40615 40627 40642 40648
    40671 40675 40806 40825 40852 40903 40938 41131 41142 41301 41302 41305 41325 41640 41823 41839 42008 42029
    42108 42109 44006 45012 45070 45153 45156 45157 45161 45168 45182 45508 45530 45539 45547 47132 47147 49510
    49900 49918 49919 49920 49972 49975 49977 49981 49983 49999
"""
SQLSERVER_DATA = """
    206 220 232 241 242 245 248 511 515 547 550 2628 3609 3616 3930 7139 8114 8115 8134 8152 8169 9803 13608
    13609 50000 51234
"""


def test_sql_server_counts_data_errors_only() -> None:
    from pytds import DatabaseError

    def translated(number: int, severity: int) -> PostdateError:
        error = DatabaseError("said by the server")
        error.number, error.severity = number, severity
        return translate_sqlserver(error, "SQL Server here")

    outages = {
        (number, severity): translated(number, severity)
        for number in map(int, SQLSERVER_OUTAGES.split())
        for severity in (16, 20)
    }
    assert_outages(outages, {number: translated(number, 16) for number in map(int, SQLSERVER_DATA.split())})


# --- Redis ------------------------------------------------------------------------------------------------------------

REDIS_OUTAGES = (
    *("MOVED 1 127.0.0.1:7000", "ASK 1 127.0.0.1:7000", "CLUSTERDOWN Hash slot not served", "TRYAGAIN Multiple keys"),
    *(
        "CROSSSLOT Keys in request don't hash to the same slot",
        "MASTERDOWN Link with MASTER is down",
        "LOADING Redis is",
    ),
    *("READONLY You can't write", "NOREPLICAS Not enough good replicas", "OOM command not allowed", "MISCONF Redis is"),
    *(
        "BUSY Redis is busy running a script",
        "UNKILLABLE Sorry",
        "NOTBUSY No scripts",
        "NOAUTH Authentication required",
    ),
    *("NOPERM this user has no permissions", "WRONGPASS invalid", "DENIED Redis is running in protected mode"),
    *("EXECABORT Transaction discarded", "UNBLOCKED client unblocked", "INPROG Failover already", "NOGOODSLAVE none"),
    *("IOERR error or timeout", "NOREAUTH", "NEXTYEAR something new", "NOSCRIPT No matching script"),
    *(
        "ERR max number of clients reached",
        "ERR max number of clients + cluster connections reached",
        "ERR unknown command",
    ),
    *(
        "ERR unknown command 'EVALSHA'",
        "ERR Error running script",
        "ERR command not allowed when used memory > 'maxmemory'",
    ),
    *(
        "ERR This instance has cluster support disabled",
        "ERR invalid DB index",
        "ERR value is not an integer",
        "WRONGTYPE x",
    ),
    *(
        "ERR Can't execute 'eval': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed",
        "ERR AUTH <x>",
    ),
    "ERR Server closed the connection",
)
REDIS_DATA = ("ERR string exceeds maximum allowed size (proto-max-bulk-len)", "ERR Protocol error: invalid bulk length")


@pytest.mark.parametrize("meanings", [REDIS_STORE, REDIS_QUEUES])
def test_redis_counts_data_errors_only(meanings: Any) -> None:
    def translated(text: str) -> PostdateError:
        error: Exception = redis_errors.ResponseError(text)
        if text.startswith("MOVED"):
            error = redis_errors.MovedError(text.removeprefix("MOVED "))
        elif text.startswith("ASK"):
            error = redis_errors.AskError(text.removeprefix("ASK "))
        return translate_redis(error, meanings, "Redis here")

    assert_outages({each: translated(each) for each in REDIS_OUTAGES}, {each: translated(each) for each in REDIS_DATA})


# --- Azure Storage ----------------------------------------------------------------------------------------------------

AZURE_OUTAGES = {
    307: "TemporaryRedirect",
    400: """
        ConditionHeadersNotSupported EmptyMetadataKey InvalidAuthenticationInfo InvalidHeaderValue
        InvalidHttpVerb InvalidMd5 InvalidMetadata InvalidQueryParameterValue InvalidResourceName InvalidUri
        Md5Mismatch MetadataTooLarge MissingRequiredHeader MissingRequiredQueryParameter
        MultipleConditionHeadersNotSupported OutOfRangeQueryParameterValue RequestUrlFailedToParse
        UnsupportedHeader UnsupportedQueryParameter InvalidMarker HostInformationNotPresent NotOfThisYear -
    """,
    403: """
        AccountIsDisabled AuthenticationFailed AuthorizationFailure InsufficientAccountPermissions
        AuthorizationSourceIPMismatch AuthorizationProtocolMismatch
    """,
    405: "UnsupportedHttpVerb",
    408: "-",
    409: """
        AccountBeingCreated QueueBeingDeleted QueueDisabled QueueNotEmpty TableBeingDeleted LeaseAlreadyPresent
        ResourceTypeMismatch ContainerBeingDeleted AccountAlreadyExists KeyVaultKeyNotFound
    """,
    411: "MissingContentLengthHeader",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError OperationTimedOut",
    501: "NotImplemented",
    503: "ServerBusy AccountBeingCreated",
}
AZURE_DATA = {
    400: """
        InvalidInput PropertyNameInvalid PropertyNameTooLong PropertyValueTooLarge TooManyProperties
        EntityTooLarge MessageTooLarge InvalidXmlDocument InvalidXmlNodeValue OutOfRangeInput InvalidValueType
    """,
    413: "RequestBodyTooLarge ContentLengthExceeded",
}


class _Answer:
    reason = ""

    def __init__(self, status: int, code: str) -> None:
        self.status_code, self.headers = status, {"x-ms-error-code": code}

    def text(self) -> str:
        return ""


@pytest.mark.parametrize("meanings", [AZURE_QUEUES, AZURE_TABLES])
def test_azure_counts_content_errors_only(meanings: Any) -> None:
    def translated(status: int, code: str) -> PostdateError:
        error = HttpResponseError("said so", response=_Answer(status, code))  # pyright: ignore[reportArgumentType]
        return translate_azure(error, meanings, "queue 'orders'")

    outages, about_data = (
        {
            (status, code): translated(status, code)
            for status, codes in answers.items()
            for code in codes.replace("-", "").split() or [""]
        }
        for answers in (AZURE_OUTAGES, AZURE_DATA)
    )
    assert_outages(outages, about_data)


# --- RabbitMQ and MSMQ ------------------------------------------------------------------------------------------------

AMQP_OUTAGES = (320, 402, 403, 405, 504, 505, 506, 530, 540, 541, 999)
AMQP_CONTENT = (406, 501, 502, 503)


def test_rabbitmq_counts_content_errors_only() -> None:
    def refused(code: int, text: str = "said by the broker") -> PostdateError:
        return _refusal(ChannelClosed(code, text), "orders")

    assert_outages({code: refused(code) for code in AMQP_OUTAGES}, {code: refused(code) for code in AMQP_CONTENT})
    assert type(refused(404)) is QueueNotFound
    assert (
        type(refused(311))
        is type(refused(406, "message size 9 is larger than configured max size 8"))
        is MessageTooLarge
    )


MSMQ_MISSING = {0x03, 0x0D, 0x14, 0x1E, 0x5A}
MSMQ_CONTENT = {0x02, 0x18, 0x19, 0x39, 0x3B, 0x3E, 0x3F, 0x5D}


def test_msmq_counts_errors_of_properties_only() -> None:
    def translated(code: int) -> PostdateError:
        error = SimpleNamespace(hresult=(0xC00E0000 | code) - (1 << 32), excepinfo=None, strerror="said by MSMQ")
        return translate_msmq(error, "orders@HERE1")  # pyright: ignore[reportArgumentType] - as much of it as is read

    errors = {code: translated(code) for code in range(1, 0x100)}
    assert {code for code, error in errors.items() if type(error) is QueueNotFound} == MSMQ_MISSING
    others = {code: error for code, error in errors.items() if code not in MSMQ_MISSING}
    assert_outages(
        {code: error for code, error in others.items() if code not in MSMQ_CONTENT},
        {code: error for code, error in others.items() if code in MSMQ_CONTENT},
    )
