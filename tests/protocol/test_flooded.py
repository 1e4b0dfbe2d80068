"""What one client says again and again takes no memory of the server's for each time, and nobody's message."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.rules import Violation
from packhorse.rules.runtime_rules import RANKS_AGREE
from packhorse.wire.messages import Hello, Reject, decode, encode
from packhorse_service.protocol.rejection import Rejections, rank_name
from packhorse_service.protocol.rendezvous import PROCESSES_A_READER, Rendezvous
from packhorse_service.protocol.stream_spec import readers_of
from tests.client.messages import EXAMPLES

LAYOUT = ParallelLayout(data=2)
HELLO: Hello = EXAMPLES["HELLO"]  # type: ignore[assignment]


def hellos() -> list[Hello]:
    """A thousand processes, each of an attempt of its own."""
    return [replace(HELLO, client=b"%016d" % n, attempt=b"%08d" % n) for n in range(1000)]


def test_a_connection_is_one_process_however_many_it_says_it_is() -> None:
    rendezvous = Rendezvous(readers_of(LAYOUT))
    for hello in hellos():
        rendezvous.add(b"one", hello, 0.0)
        assert [pending.hello.client for pending in rendezvous.pending()] == [hello.client]
    assert len(rendezvous.candidates.by_size()) == 2


def test_connections_that_come_and_go_leave_nothing() -> None:
    rendezvous = Rendezvous(readers_of(LAYOUT))
    for number, hello in zip(count(), hellos(), strict=False):
        rendezvous.add(b"%d" % number, hello, 0.0)
        rendezvous.forget(b"%d" % number)
    assert not rendezvous.pending()
    assert len(rendezvous._arrivals._first_hello_s) <= PROCESSES_A_READER * 2 + 1
    assert not rendezvous._arrivals._client_of


def test_a_process_that_comes_back_on_another_connection_keeps_its_place() -> None:
    rendezvous = Rendezvous(readers_of(LAYOUT))
    rendezvous.add(b"before", HELLO, 0.0)
    rendezvous.add(b"after", HELLO, 1.0)
    assert [pending.peer for pending in rendezvous.pending()] == [b"after"]
    rendezvous.forget(b"before")
    assert [pending.peer for pending in rendezvous.pending()] == [b"after"]


def violation(field: str, want: str, got: str, remedy: str) -> Violation:
    return RANKS_AGREE.violation(field, want=want, got=got, remedy=remedy)


def reject_of(rejections: Rejections) -> Reject:
    """What all that wait are told, from the wire."""
    sent = Reject(stream="train", violations=rejections.violations([], []))
    received, _ = decode([encode(sent)])
    assert isinstance(received, Reject)
    return received


def test_however_many_readers_were_refused_and_whatever_they_declared_the_list_can_be_read() -> None:
    rejections = Rejections(LAYOUT)
    for rank in range(10_000):
        hello = replace(HELLO, reader=Coordinates(rank, 0, 0, 0), layout=ParallelLayout(data=20_000))
        long = ("w" * 3000, "g" * 3000, "r" * 3000)
        violations = [violation(f"field{n}", *long) for n in range(12)]
        told = rejections.reject(hello, violations)
        decode([encode(Reject(stream="train", violations=told))])
    listed = reject_of(rejections).violations
    assert rank_name(ParallelLayout(data=20_000), Coordinates(0, 0, 0, 0)) in listed[0].field
    assert "more violations" in listed[-1].got


def test_a_list_that_fits_is_told_whole() -> None:
    rejections = Rejections(LAYOUT)
    for rank in range(2):
        hello = replace(HELLO, reader=Coordinates(rank, 0, 0, 0), layout=LAYOUT, contract=BatchContract())
        rejections.reject(hello, [violation("seq_length", "2", "1", "set it to 2")])
    assert [violation.got for violation in reject_of(rejections).violations] == ["1", "1"]
