"""A state that is loaded while the server already greets, welcomes or sends from the start."""

from __future__ import annotations

import itertools
import re
import struct

import pytest

from packhorse.contract.layout import Coordinates
from packhorse.contract.position import Position
from packhorse.errors import ContractError, HandshakeRefused
from packhorse.protocol.checkpoint_state import FeedState
from tests.protocol.network import Network, undisturbed

STEP = 3
STATE = FeedState("train", Position(STEP, 0), bytes(16), struct.pack("<Q", STEP))


def move(network: Network, rounds: int) -> None:
    """Let messages pass and steps be made; no loop takes anything."""
    for _ in range(rounds):
        network.server.produce(network)
        for at in network.clients:
            network.deliver_to_server(at)
            network.deliver_to_client(at)


def load(network: Network, at: Coordinates, state: FeedState) -> None:
    client = network.clients[at]
    network.client_effects(client, client.session.resume(state))


@pytest.mark.parametrize(("before_first", "before_second"), list(itertools.product(range(7), range(5))))
def test_every_reader_begins_at_the_state_whatever_it_was_told_before(before_first: int, before_second: int) -> None:
    network = Network()
    first, second = network.clients
    for at in network.clients:
        network.connect(at)
    move(network, before_first)
    load(network, first, STATE)
    move(network, before_second)
    load(network, second, STATE)
    network.settle()
    for at, client in network.clients.items():
        assert client.error is None
        taken = [(mb.position, mb.row_digest) for mb in client.taken]
        assert taken == [entry for entry in undisturbed(at) if entry[0].step >= STEP]


def test_inside_a_step_another_stream_is_refused() -> None:
    network = Network()
    for at in network.clients:
        load(network, at, FeedState("train", Position(STEP, 1), b"another stream!!", STATE.snapshot))
    network.settle()
    for client in network.clients.values():
        assert isinstance(client.error, ContractError)
        assert "inside a step, at (3, 1)" in str(client.error)
        assert re.search(r"resume at a boundary\. The nearest are \(3, 0\), .* and \(4, 0\)$", str(client.error))
        assert client.taken == []


def resumed_apart(first: FeedState, second: FeedState) -> list[str]:
    """What both readers hear at the deadline where their states differ."""
    network = Network()
    for at, state in zip(network.clients, (first, second), strict=True):
        load(network, at, state)
        network.connect(at)
    move(network, 3)
    network.tick(539)
    move(network, 3)
    heard = []
    for client in network.clients.values():
        assert isinstance(client.error, HandshakeRefused)
        assert client.taken == []
        heard.append("; ".join(map(str, client.error.violations)))
    return heard


def test_readers_that_resume_at_different_positions_are_refused_with_the_list_of_who_stands_where() -> None:
    other = FeedState("train", Position(4, 0), bytes(16), struct.pack("<Q", 4))
    one, two = resumed_apart(STATE, other)
    assert one == two
    assert "dp0·cp0·tp0·pp0 at (3, 0) with snapshot " in one
    assert "dp1·cp0·tp0·pp0 at (4, 0) with snapshot " in one
    assert "resume all ranks from one checkpoint" in one


def test_readers_that_resume_at_one_position_of_different_runs_are_refused_with_their_snapshots() -> None:
    (one, _) = resumed_apart(STATE, FeedState("train", Position(STEP, 0), bytes(16), b"another"))
    named = re.findall(r"(dp\d)·cp0·tp0·pp0 at \(3, 0\) with snapshot (\w{8})", one)
    assert [reader for reader, _ in named] == ["dp0", "dp1"]
    assert len({snapshot for _, snapshot in named}) == 2
