"""The client's socket at a reconnect, which the tests of the protocol take for granted; and a HELLO in vain."""

from __future__ import annotations

from pathlib import Path

import zmq

from packhorse import Feed
from packhorse.protocol.client_session import UNANSWERED_LIMIT
from packhorse.transport.dealer import ConnectionEvent, Dealer
from packhorse.wire.messages import Hello, decode
from tests.harness import wait_until


def serve(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 1000)
    router.bind(endpoint)
    return router


def connect(dealer: Dealer) -> None:
    wait_until(lambda: ConnectionEvent.UP in list(dealer.events()), "a connection")


def say(router: zmq.Socket[bytes], dealer: Dealer, text: bytes) -> None:
    """The server answers a word of the client's; the answer has arrived and is not read."""
    assert dealer.send([b"say"])
    assert router.poll(10_000)
    peer, _ = router.recv_multipart()
    router.send_multipart([peer, text])
    assert dealer._socket.poll(10_000)


def test_what_arrived_on_a_connection_that_broke_is_not_read_once_the_next_is_up(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/server"
    with zmq.Context() as context:
        dealer = Dealer(endpoint)
        with serve(context, endpoint) as router:
            connect(dealer)
            say(router, dealer, b"old")
        with serve(context, endpoint) as router:
            connect(dealer)
            say(router, dealer, b"new")
            assert [[bytes(frame) for frame in frames] for frames in dealer.messages()] == [[b"new"]]
        dealer.close()


def test_a_feed_that_hears_nothing_says_hello_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/server"
    with zmq.Context() as context, serve(context, endpoint) as router, Feed(endpoint, rank=0, world_size=1) as feed:
        feed._connection.session.progress.keep_alive_s = 0.01
        hellos = []
        for _ in range(3):
            assert router.poll(10_000), f"HELLO again after {UNANSWERED_LIMIT} intervals"
            _, *frames = router.recv_multipart()
            hellos.append(decode(frames)[0])
    assert all(isinstance(hello, Hello) for hello in hellos)
    assert len(set(hellos)) == 1, "and the same"
