"""BYE, and connections that are gone before it is read."""

from __future__ import annotations

from packhorse.wire.messages import encode
from tests.protocol.network import Network


def test_a_bye_counts_that_is_read_after_its_connection_was_found_gone() -> None:
    """An ACK read before it makes the server send to a reader that has just left."""
    network = Network()
    network.settle()
    session = network.server.session
    for at, client in network.clients.items():
        client.to_server += [[encode(client.session.ack(0.0))], [encode(client.session.bye())]]
        session.lost(client.peer)
        assert not session.done
        while network.deliver_to_server(at):
            pass
    assert session.done


def test_a_reader_that_is_back_is_not_taken_for_gone_by_what_its_old_connection_said() -> None:
    network = Network()
    network.settle()
    session = network.server.session
    for at, client in network.clients.items():
        before = client.peer
        network.cut(at, noticed=True)
        network.connect(at)
        network.deliver_to_server(at)
        session.receive(before, client.session.bye(), (), network.now)
    assert not session.done
