"""What a server refuses at the handshake, what it only warns of, and readers that disagree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packhorse.contract.batch_contract import BatchContract, LossReduction, ReaderPolicy, resolve
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.trainer_facts import Stack, TrainerFacts
from packhorse.protocol.client_session import ClientSession
from packhorse.protocol.effects import Send
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.rules import Violation, compare
from packhorse.wire.messages import Hello, Reject, Welcome, decode, encode
from packhorse_service.protocol.effects import Send as ServerSend
from packhorse_service.protocol.readers import Reader
from packhorse_service.protocol.rendezvous import PendingHello
from packhorse_service.protocol.stream_session import StreamSession
from packhorse_service.protocol.stream_spec import StreamSpec, disagreements, readers_of

LAYOUT = ParallelLayout(data=2)


def stream_spec(**declared: Any) -> StreamSpec:
    contract = resolve(BatchContract(**declared), LAYOUT, seq_length=8, global_batch_size=4, vocab_size=100)
    return StreamSpec(
        stream="train",
        layout=LAYOUT,
        contract=contract,
        fingerprint=bytes(16),
        readers=readers_of(LAYOUT),
    )


def client(rank: int, contract: BatchContract | None = None, window: int = 2) -> ClientSession:
    identity = Identity(
        stream="train",
        reader=LAYOUT.coordinates(rank),
        client=bytes([rank] * 16),
        layout=LAYOUT,
        contract=contract or BatchContract(),
        window=window,
    )
    return ClientSession(ReaderProgress(identity))


def hello_of(session: ClientSession) -> Hello:
    (hello,) = [effect.message for effect in session.connected() if isinstance(effect, Send)]
    assert isinstance(hello, Hello)
    return hello


def greeted(server: StreamSession, *clients: ClientSession) -> list[ServerSend]:
    """What the server sends while these say HELLO, one after the other."""
    effects = [
        effect
        for rank, session in enumerate(clients)
        for effect in server.receive(bytes([rank]), hello_of(session), (), 0.0)
    ]
    effects += server.restored(1, 0.0)
    return [effect for effect in effects if isinstance(effect, ServerSend)]


def test_every_broken_rule_refuses_the_reader_at_once() -> None:
    contract = BatchContract(seq_length=16, trainer=TrainerFacts(transformer_impl="local"))
    found = stream_spec().violations_of(hello_of(client(0, contract, window=1)))
    assert [violation.rule for violation in found] == ["SEQ_LENGTH_MATCH", "THD_BACKEND", "WINDOW"]


def test_a_warning_refuses_nobody_and_reaches_the_log_once_and_every_reader(caplog: pytest.LogCaptureFixture) -> None:
    clients = [client(0), client(1)]
    sent = greeted(StreamSession(stream_spec(loss_reduction=LossReduction.MEAN)), *clients)
    welcomes = [effect for effect in sent if isinstance(effect.message, Welcome)]
    assert len(welcomes) == len(clients)
    for effect, session in zip(welcomes, clients, strict=True):
        message, extra = decode([encode(effect.message)])
        session.receive(message, extra)
        assert [warning.rule for warning in session.progress.warnings] == ["PER_TOKEN_LOSS"]
    assert caplog.text.count("PER_TOKEN_LOSS") == 1


def test_readers_that_declare_different_contracts_are_all_refused_by_name() -> None:
    server = StreamSession(stream_spec())
    sent = greeted(server, client(0, BatchContract(seq_length=8)), client(1))
    assert [type(effect.message) for effect in sent] == [Reject, Reject]
    assert isinstance(sent[0].message, Reject)
    (violation,) = sent[0].message.violations
    assert (violation.rule, violation.field) == ("RANKS_AGREE", "seq_length")
    assert str(LAYOUT.coordinates(1)) in violation.got
    assert not server.rendezvous.pending()


def test_readers_that_were_refused_may_agree_and_come_again() -> None:
    server = StreamSession(stream_spec())
    greeted(server, client(0, BatchContract(seq_length=8)), client(1))
    sent = greeted(server, client(0), client(1))
    assert [type(effect.message) for effect in sent] == [Welcome, Welcome]


def disagree(*contracts: BatchContract) -> list[Violation]:
    hellos = {Coordinates(rank, 0, 0, 0): hello_of(client(0, contract)) for rank, contract in enumerate(contracts)}
    return disagreements(hellos)


def test_facts_about_the_trainer_are_compared_too() -> None:
    stock, own = (BatchContract(trainer=TrainerFacts(stack=stack)) for stack in (Stack.MEGATRON_BRIDGE, Stack.OWN))
    assert [violation.field for violation in disagree(stock, own)] == ["trainer.stack"]
    assert disagree(stock, stock) == []


def test_of_many_readers_that_differ_a_few_are_named() -> None:
    (violation,) = disagree(*[BatchContract(seq_length=8)] * 11, *[BatchContract(seq_length=16)] * 10)
    assert violation.want.endswith("most declare 8")
    assert violation.got.endswith("and 2 more")


class TestPipeline:
    """Which stages read, and what they get."""

    def readers(self, policy: ReaderPolicy, **layout: Any) -> set[tuple[int, int]]:
        return {(at.tensor, at.pipeline) for at in readers_of(ParallelLayout(tensor=2, **layout), policy)}

    def test_the_edges_read_and_every_stage_with_prediction_layers(self) -> None:
        edges = ReaderPolicy.TENSOR_ZERO_EDGES
        assert self.readers(edges, pipeline=4) == {(0, 0), (0, 3)}
        assert self.readers(edges, pipeline=4, mtp_stages=(2,)) == {(0, 0), (0, 2), (0, 3)}

    def test_a_reader_that_places_prediction_layers_elsewhere_is_refused(self) -> None:
        """Under the other placement a stage that needs rows would not be waited for, and get none."""
        served = ParallelLayout(pipeline=4)
        contract = resolve(BatchContract(), served, seq_length=8, global_batch_size=4, vocab_size=100)
        declared = ParallelLayout(pipeline=4, mtp_stages=(2,))
        (found,) = compare(BatchContract(), declared, 2, contract, served)
        assert (found.field, found.got) == ("layout.mtp_stages", "(2,)")

    @pytest.mark.parametrize(
        ("facts", "tokens", "labels"),
        [
            (TrainerFacts(), [0], [3]),
            (TrainerFacts(mtp_num_layers=1), [0, 2, 3], [2, 3]),
            (TrainerFacts(tokens_on_every_stage=True), [0, 1, 2, 3], [3]),
            (TrainerFacts(tokens_on_every_stage=True, mtp_num_layers=1), [0, 1, 2, 3], [2, 3]),
        ],
    )
    def test_a_stage_gets_what_its_trainer_reads_there(
        self, facts: TrainerFacts, tokens: list[int], labels: list[int]
    ) -> None:
        layout = ParallelLayout(pipeline=4, mtp_stages=(2,) if facts.mtp_num_layers else ())
        contract = resolve(BatchContract(), layout, seq_length=8, global_batch_size=4, vocab_size=100)
        spec = replace(stream_spec(), layout=layout, contract=contract, readers=readers_of(layout))
        hello = hello_of(client(0, BatchContract(trainer=facts)))
        needs = [
            Reader.from_hello(at, PendingHello(b"peer", hello, 0), spec, 0.0).view.needs for at in sorted(spec.readers)
        ]
        assert [stage for stage, fields in enumerate(needs) if "tokens" in fields] == tokens
        assert [stage for stage, fields in enumerate(needs) if "labels" in fields] == labels
