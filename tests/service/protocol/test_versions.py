"""Readers of other versions, and of trainers that know more than the server: who is told what."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest

from packhorse import __version__
from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import Coordinates
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.rules import Severity, Violation
from packhorse.schema import HEADER_LIMIT_BYTES
from packhorse.wire.facts import UnknownFact
from packhorse.wire.hello import PROTOCOL_VERSION, ForeignHello, Hello
from packhorse.wire.messages import Message, Reject, Welcome, decode, encode
from packhorse_service.protocol.effects import Send
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import disagreements
from tests.service.protocol.test_stream_spec import client, hello_of, stream_spec

NEXT_VERSION = PROTOCOL_VERSION + 1
NEWER = ForeignHello(min_version=NEXT_VERSION, max_version=NEXT_VERSION, stream="train", reader=Coordinates(1, 0, 0, 0))
OLDER = replace(NEWER, min_version=1, max_version=PROTOCOL_VERSION - 1)


def sent(server: StreamSession, *hellos: Hello) -> list[Message]:
    """What the server sends while these readers come, one after the other."""
    effects = [effect for rank, hello in enumerate(hellos) for effect in server.receive(bytes([rank]), hello, (), 0.0)]
    effects += server.restored(1, 0.0)
    return [effect.message for effect in effects if isinstance(effect, Send)]


def told(server: StreamSession, hello: ForeignHello, now: float = 0.0) -> Violation:
    """The one violation for which a reader is rejected, as it reads it."""
    (effect,) = server.receive(b"peer", hello, (), now)
    assert isinstance(effect, Send)
    message, _ = decode([encode(effect.message)])
    assert isinstance(message, Reject)
    (violation,) = message.violations
    return violation


@pytest.mark.parametrize("hello", [NEWER, OLDER], ids=["newer", "older"])
def test_a_reader_of_another_version_is_told_both_versions_and_what_to_install(hello: ForeignHello) -> None:
    violation = told(StreamSession(stream_spec()), hello)
    assert (violation.rule, violation.severity) == ("PROTOCOL", Severity.ERROR)
    assert violation.got == hello.versions
    assert violation.want.startswith(str(PROTOCOL_VERSION))
    assert f"install packhorse {__version__}" in violation.remedy
    assert ("upgrade the server" in violation.remedy) == (hello is NEWER)
    assert "rank 1" in violation.field


def test_a_reader_whose_form_is_not_known_is_told_what_was_found() -> None:
    problem = "HELLO must be a map of exactly …"
    hello = replace(NEWER, min_version=PROTOCOL_VERSION, problem=problem)
    violation = told(StreamSession(stream_spec()), hello)
    assert violation.rule == "PROTOCOL"
    assert problem in violation.got


def test_it_is_told_so_even_where_the_stream_has_failed() -> None:
    """Any other message it may not understand."""
    server = StreamSession(stream_spec())
    server.fail("the disk is full", 0.0)
    assert told(server, NEWER).rule == "PROTOCOL"


def test_those_that_wait_for_it_are_told_at_the_deadline_why_it_did_not_come() -> None:
    server = StreamSession(stream_spec())
    server.receive(b"waits", hello_of(client(0)), (), 0.0)
    told(server, NEWER)
    rejected = [effect.message for effect in server.tick(1e6) if isinstance(effect, Send)]
    (message,) = (message for message in rejected if isinstance(message, Reject))
    assert [violation.rule for violation in message.violations] == ["PROTOCOL"]
    assert "rank 1" in message.violations[0].field


def test_a_reader_that_speaks_several_versions_is_served_in_this_one() -> None:
    server = StreamSession(stream_spec())
    hellos = [replace(hello_of(client(rank)), min_version=1, max_version=NEXT_VERSION) for rank in range(2)]
    assert [type(message) for message in sent(server, *hellos)] == [Welcome, Welcome]


# Facts ----------------------------------------------------------------------------------------------

FACTS = BatchContract(trainer=TrainerFacts(sft=True))


def knowing(rank: int, *facts: UnknownFact) -> Hello:
    """HELLO of a trainer that declares facts which the server does not know."""
    hello = hello_of(client(rank, FACTS))
    return replace(hello, unknown_facts=facts, contract_digest=blake2b(repr(facts).encode(), digest_size=16).digest())


def test_facts_that_are_not_known_are_reported_as_not_checked_and_the_reader_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hellos = [knowing(rank, UnknownFact("newer", 3), UnknownFact("stack", "jax")) for rank in range(2)]
    welcomes = sent(StreamSession(stream_spec()), *hellos)
    assert len(welcomes) == len(hellos)
    for message in welcomes:
        assert isinstance(message, Welcome)
        (warning,) = message.warnings
        assert (warning.rule, warning.severity, warning.field) == ("KNOWN_FACTS", Severity.WARN, "trainer")
        assert "newer = 3" in warning.got
        assert "stack = 'jax'" in warning.got
        assert "not checked by this server" in warning.remedy
    assert caplog.text.count("KNOWN_FACTS") == 1


def test_however_many_facts_are_not_known_the_welcome_can_be_read() -> None:
    many = tuple(UnknownFact(f"fact_{number}", ("x" * 200,) * 200) for number in range(64))
    (warning,) = stream_spec().warnings(knowing(0, *many))
    assert "and 56 more" in warning.got
    assert len(warning.got) < 2048 < HEADER_LIMIT_BYTES


def test_ranks_that_declare_different_facts_disagree_though_nobody_here_knows_them() -> None:
    one, other = knowing(0, UnknownFact("newer", 3)), knowing(1, UnknownFact("newer", 4))
    (violation,) = disagreements({one.reader: one, other.reader: other})
    assert (violation.rule, violation.field) == ("RANKS_AGREE", "trainer.newer")
    assert "4" in violation.got


def test_a_rank_that_declares_a_fact_which_the_others_do_not_disagrees() -> None:
    one, other = knowing(0), knowing(1, UnknownFact("newer", True))
    (violation,) = disagreements({one.reader: one, other.reader: other})
    assert violation.field == "trainer.newer"
    assert violation.got.endswith("True")


def test_ranks_that_declare_the_same_facts_agree() -> None:
    facts = (UnknownFact("newer", (1, "two")),)
    one, other = knowing(0, *facts), knowing(1, *facts)
    assert disagreements({one.reader: one, other.reader: replace(other, contract_digest=bytes(16))}) == []
