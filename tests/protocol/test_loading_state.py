"""A state that is loaded while the server already greets, welcomes or sends from the start."""

from __future__ import annotations

import itertools
import struct

import pytest

from packhorse.errors import ContractError
from packhorse.layout import Coordinates
from packhorse.microbatch import Position
from packhorse.state import FeedState
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
        assert "inside a step" in str(client.error)
        assert client.taken == []
