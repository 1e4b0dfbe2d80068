"""The iterator of one rank: deadlines, states of a checkpoint, further streams for evaluations.

Each stream has a Feed with a connection, a thread (``transport.connection``) and a window of its own, so that none of
them waits for another. What passes between the thread and the loop is in ``transport.ready_queue``.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import TracebackType
from typing import Any, Self

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import BatchContract
from packhorse.contract.layout import ParallelLayout
from packhorse.contract.position import Position
from packhorse.declare.rank_info import detect_rank
from packhorse.errors import ConfigError, PackhorseError
from packhorse.feeding.array_converter import Arrays, array_converter
from packhorse.feeding.chunks import Chunks
from packhorse.feeding.further_streams import FurtherStreams
from packhorse.feeding.hand_over import HandOver
from packhorse.feeding.loop_waits import LoopWaits
from packhorse.feeding.stats import FeedStats
from packhorse.protocol.checkpoint_state import FeedState, read_states, write_states
from packhorse.protocol.client_session import ClientSession
from packhorse.protocol.reader_progress import Identity, ReaderProgress
from packhorse.rules import Violation
from packhorse.transport.connection import END_WAIT_S, Connection
from packhorse.transport.key_files import find_client_key
from packhorse.wire.messages import DEFAULT_WINDOW

__all__ = ["Feed", "FeedStats"]


class Feed(Iterator[MicroBatch]):
    """Iterate the micro-batches of one rank.

    ``endpoint``: ``tcp://host:port`` or ``ipc://path`` of a running ``packhorse serve``. ``contract`` and
    ``layout`` are what this trainer relies on: the server refuses a job that differs. ``rank`` comes from
    the argument, torch.distributed, torchrun or Slurm, in that order.

    ``window``: micro-batches the server may send ahead of the loop. ``start_timeout`` bounds the wait for
    all readers to meet, ``stall_timeout`` the wait for one micro-batch, both in seconds and only while the
    loop is asking; they stay below the 600 s after which NCCL gives up. ``arrays``: ``"torch"`` (int64,
    float32 and int32 tensors) or ``"numpy"``. ``key_file``: of this trainer (``packhorse keygen``), for a server
    that takes clients with a key only; left out, the environment variable ``PACKHORSE_KEY_FILE`` names it.

    Raises ``ConfigError`` where an argument or a key file cannot be used; from the iteration
    ``AuthenticationFailed``, ``HandshakeRefused``, ``StartTimeout``, ``StallTimeout``, ``ServerFailed``.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        contract: BatchContract | None = None,
        layout: ParallelLayout | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        stream: str = "train",
        window: int = DEFAULT_WINDOW,
        start_timeout: float = 540.0,
        stall_timeout: float = 540.0,
        arrays: Arrays = "torch",
        key_file: str | os.PathLike[str] | None = None,
    ) -> None:
        layout = layout or ParallelLayout()
        place = detect_rank(layout, rank, world_size)
        if place.world_size != layout.world_size:
            raise ConfigError(
                f"world size {place.world_size} (from {place.source}) must equal the layout {layout} of "
                f"{layout.world_size} ranks; pass the layout of this job"
            )
        self.endpoint = endpoint
        self.layout = layout
        self.rank = place.rank
        self.coordinates = layout.coordinates(place.rank)
        identity = Identity(
            stream=stream,
            reader=self.coordinates,
            client=secrets.token_bytes(16),
            layout=layout,
            contract=contract or BatchContract(),
            window=window,
            start_timeout_s=float(start_timeout),
        )
        self._options: dict[str, Any] = {
            "window": window,
            "start_timeout": start_timeout,
            "stall_timeout": stall_timeout,
            "arrays": arrays,
            "key_file": key_file,
        }
        self._further: FurtherStreams[Feed] = FurtherStreams()
        session = ClientSession(ReaderProgress(identity))
        self._connection = Connection(endpoint, session, array_converter(arrays), key=find_client_key(key_file))
        self._thread = threading.Thread(target=self._connection.run, name=f"packhorse-feed-{place.rank}", daemon=True)
        # Also at interpreter exit: a finished reader then says BYE even when nobody called close().
        self._finalizer = weakref.finalize(self, _shut, self._connection, self._thread)
        self._waits = LoopWaits(self._connection, self.rank, start_timeout, stall_timeout)
        self._hand_over = HandOver(self._connection, self._waits, self._finalizer)
        self._thread.start()

    def __iter__(self) -> Iterator[MicroBatch]:
        """Iterate from where the loop stands to the end: of the stream, or of one pass over an evaluation stream."""
        return iter(self._hand_over)

    # Nothing of Python stands between what is taken and the loop, where an interrupt could lose it (``hand_over``).
    __next__ = property(
        attrgetter("_hand_over.next"),
        doc="Return the next micro-batch; behind the end of a pass, the first of the next one.",
    )

    def steps(self) -> Iterator[tuple[MicroBatch, ...]]:
        """Iterate whole steps: the ``num_microbatches`` micro-batches of this rank, in order.

        A step counts as taken once all of it is there and was handed out. Where the loop stands inside a step, by a
        state or because it took some one by one, the rest of that step comes first, as a shorter one.
        """
        return self._hand_over.steps()

    def chunks(self, count: int) -> tuple[Iterator[MicroBatch], ...]:
        """Return iterators for the ``count`` model chunks of a virtual pipeline, over this one session.

        Each yields every micro-batch at its own pace; one is taken when the slowest has taken it. The
        window must reach from the fastest to the slowest: a group of micro-batches and one more. They end
        where the feed's own iteration does.
        """
        chunks = Chunks(count, self._hand_over)
        return tuple(map(chunks.iterate, range(count)))

    def verify_peers(self, group: Any = None) -> None:
        """Check over a ``torch.distributed`` group that its ranks took the same micro-batch last; collective.

        Raises ``ContractError`` on every rank where they did not, naming who holds what.
        """
        from packhorse.feeding.peers import verify_same  # torch is an extra

        verify_same(self.position, self._connection.session.progress.last_digest, group)

    @property
    def position(self) -> Position:
        """Position (step, index) of the next micro-batch; one step further once the end was taken."""
        return self._hand_over.position

    def stream(self, name: str, *, contract: BatchContract | None = None, layout: ParallelLayout | None = None) -> Feed:
        """Return a further stream of the same server, for evaluations: iterating it gives one pass over all its data.

        It can be read between training steps, and by ranks that train no more. Iterating again gives the next
        pass, or the rest of one that was left. All ranks open it, each once; closing this feed closes it.

        ``contract`` and ``layout`` left out are this feed's, as a server's configuration has it.

        Raises ``ConfigError`` where it is open with another contract or layout.
        """
        if not self._finalizer.alive:
            raise PackhorseError(f"stream {name!r} cannot be opened: this Feed is closed; create another to go on")
        own = self._connection.session.progress.identity
        declared = contract or replace(own.contract, remainder=None)  # a pass drops nothing
        opened = self._further.feeds.get(name)
        if opened is not None and opened._finalizer.alive:
            theirs = opened._connection.session.progress.identity
            if (contract or theirs.contract, layout or theirs.layout) != (theirs.contract, theirs.layout):
                raise ConfigError(f"stream {name!r} is open with another contract or layout; close that feed first")
            return opened
        if name == own.stream:
            raise ConfigError(f"stream {name!r} is what this Feed reads; a further one has another name")
        saved = opened._saved() if opened is not None else self._further.kept_state(name)
        feed = Feed(
            self.endpoint,
            contract=declared,
            layout=layout or self.layout,
            rank=self.rank,
            world_size=self.layout.world_size,
            stream=name,
            **self._options,
        )
        feed._resume(saved)
        self._further.add(name, feed)
        return feed

    @property
    def attempt(self) -> str:
        """Name of the attempt that this reader is part of, in hexadecimal; empty until one has formed."""
        return self._connection.session.attempt.hex()

    def state_dict(self, step: int | None = None) -> dict[str, object]:
        """Return what to put in a checkpoint: where the loop stands in every stream, strings, integers and lists only.

        It counts what the loop has taken, never what was fetched ahead. A loop that has taken micro-batches
        of a step it has not trained passes ``step``, the number of steps trained: it gets the boundary
        before that step, of which the last two are held. Equal on all ranks at a step boundary.

        Raises ``ContractError`` where that boundary is not held.
        """
        further = {name: feed._saved() for name, feed in self._further.feeds.items()}
        return write_states(self._saved(step), {**self._further.kept, **further}.values())

    def load_state_dict(self, state: Mapping[str, object], *, repeat_step: bool = False) -> None:
        """Go on where ``state`` was saved, from any server of the same data; on all ranks, before iterating.

        Inside a step only the same layout and batch sizes go on; a boundary resumes on others too. A further
        stream goes on when it is opened; one that the state does not know begins at its start. ``repeat_step``: a
        state inside a step begins at the first micro-batch of that step, as where the batch sizes differ now.

        Raises ``ContractError`` that names what is wrong with the state, or that it comes too late.
        """
        own = self._connection.session.progress.identity.stream
        states = read_states(state, own)
        if repeat_step:
            states = {name: of_stream.at_boundary() for name, of_stream in states.items()}
        feeds = {own: self, **self._further.feeds}
        for feed in feeds.values():
            feed._connection.session.progress.require_fresh()
        for name, feed in feeds.items():
            feed._resume(states.pop(name, FeedState(name)))
        self._further.kept = states

    # As torchdata and Megatron-Energon spell it.
    save_state = state_dict
    restore_state = load_state_dict

    def _saved(self, step: int | None = None) -> FeedState:
        return self._hand_over.saved(step)

    def _resume(self, saved: FeedState) -> None:
        with self._connection.lock:
            self._connection.queue.resume(saved)
            self._connection.request_flush()
        self._connection.flush()

    def stats(self) -> FeedStats:
        """Return what this rank has taken and waited for so far; times are seconds."""
        return self._waits.stats(self._hand_over.taken)

    @property
    def warnings(self) -> tuple[Violation, ...]:
        """Rules whose break the server warned of at the handshake, and serves nevertheless."""
        return self._connection.session.progress.warnings

    def close(self) -> None:
        """Say BYE and stop the threads, of further streams too.

        At the end of the stream it first waits, half a minute at most, until all other readers have ended or left:
        a server that takes another's place needs every reader to tell any of them the end.
        """
        self._leave(in_order=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A crash is no orderly leave: the server keeps the stream for the job's next attempt.
        self._leave(in_order=kind is None)

    def _leave(self, *, in_order: bool) -> None:
        for feed in self._further.feeds.values():
            feed._leave(in_order=in_order)
        self._connection.leaving = in_order
        self._finalizer()


def declared_contract(feed: Feed) -> BatchContract:
    """Return what the trainer declared with its feed; what it left out is the server's."""
    return feed._connection.session.progress.identity.contract


def _shut(connection: Connection, thread: threading.Thread) -> None:
    connection.stop()
    thread.join(timeout=END_WAIT_S + 5)
