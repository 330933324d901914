"""The fixtures of pytest, as a project has them that has the wheel and none of our settings."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester, unpacked_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return an empty project whose Python has the wheel."""
    monkeypatch.setenv("PYTHONPATH", str(unpacked_wheel))
    return pytester


SENDING = """
    from dataclasses import dataclass
    from datetime import timedelta

    import pytest
    from postdate.errors import ConfigurationError, DuplicateMessage

    HOUR = timedelta(hours=1)

    @dataclass
    class Remind:
        of: str
"""


def test_a_test_sees_what_was_scheduled_and_what_was_sent(project: pytest.Pytester) -> None:
    project.makepyfile(
        SENDING
        + """
    def test_sync(postdate_client):
        shop = postdate_client.blocking
        later = shop.send(Remind("later"), destination="mails", delay=HOUR)
        shop.send(Remind("at once"), destination="mails")
        shop.send(b"raw", destination="bills", deliver_at=postdate_client.now + 3 * HOUR)
        assert postdate_client.sent == [Remind("at once")]
        first, second = postdate_client.waiting()
        assert (first.message, first.destination, first.due) == (Remind("later"), "mails", postdate_client.now + HOUR)
        assert second.message == b"raw"
        postdate_client.advance(minutes=59)
        assert len(postdate_client.sent) == 1
        begun = postdate_client.now
        postdate_client.advance(hours=5)
        assert postdate_client.sent_to("mails") == [Remind("at once"), Remind("later")]
        assert [each.at - begun for each in postdate_client.deliveries[1:]] == [HOUR / 60, 2 * HOUR + HOUR / 60]
        assert postdate_client.waiting() == []
        assert not shop.cancel(later)

    def test_changes(postdate_client):
        shop = postdate_client.blocking
        first = shop.send(Remind("a"), destination="q", delay=HOUR)
        assert shop.reschedule(first, delay=2 * HOUR)
        with pytest.raises(DuplicateMessage):
            shop.send(Remind("b"), destination="q", delay=HOUR, message_id=first)
        for text in "cd":
            shop.replace(Remind(text), key="k", destination="q", delay=HOUR)
        assert [each.message for each in postdate_client.waiting()] == [Remind("d"), Remind("a")]
        assert shop.cancel(first)
        shop.close()  # as the code under test may do
        assert [each.message for each in postdate_client.waiting()] == [Remind("d")]

    def test_each_test_has_its_own(postdate_client):
        assert postdate_client.waiting() == []

    def test_no_time_is_given_back(postdate_client):
        with pytest.raises(ValueError, match="does not run backwards"):
            postdate_client.advance(-HOUR)

    def test_a_transaction_is_refused(postdate_client):
        with pytest.raises(ConfigurationError, match="cannot be part of a transaction"):
            postdate_client.blocking.send(b"", destination="q", transaction=object())
    """
    )
    project.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=5)


ASYNC = (
    SENDING
    + """
    async def test_client(postdate_client):
        await postdate_client.send(Remind("x"), destination="q", delay=HOUR)
        postdate_client.advance(HOUR)
        assert postdate_client.sent == [Remind("x")]

    async def test_endpoint(endpoint_test):
        def configure(endpoint):
            @endpoint.handler(Remind)
            async def remind(message, context):
                await context.send(b"mail", destination="smtp", delay=HOUR)

        async with endpoint_test(configure) as test:
            await test.send(Remind("x"))
            await test.advance(hours=1)
            assert test.sent_to("smtp") == [b"mail"]

    class TestClass:
        async def test_method(self, postdate_client):
            assert await postdate_client.list() == []
    """
)


@pytest.mark.parametrize("other", [["-p", "no:anyio"], [], ["-o", "anyio_mode=auto"]], ids=" ".join)
def test_an_asynchronous_test_needs_no_mark(project: pytest.Pytester, other: list[str]) -> None:
    project.makepyfile(ASYNC)
    project.runpytest_subprocess(*other).assert_outcomes(passed=3)


def test_an_asynchronous_test_that_fails_is_red(project: pytest.Pytester) -> None:
    project.makepyfile("async def test_it(postdate_client):\n    assert postdate_client.sent == [1]\n")
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert*== [[]1]*"])


def test_other_asynchronous_tests_are_left_to_other_plugins(project: pytest.Pytester) -> None:
    project.makepyfile("async def test_it():\n    raise AssertionError('run')\n")
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])


def test_a_project_that_uses_no_fixture_imports_nothing_for_it(project: pytest.Pytester) -> None:
    project.makepyfile("""
        import sys

        def test_modules():
            assert {each for each in sys.modules if each.partition(".")[0] == "postdate"} == {
                "postdate", "postdate.pytest_plugin"
            }
    """)
    project.runpytest_subprocess().assert_outcomes(passed=1)
