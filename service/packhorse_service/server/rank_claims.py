"""Claims of ranks: which reader the holder of a key may be, of a server with a list of clients."""

from __future__ import annotations

import logging

from packhorse.rules import Violation
from packhorse.wire.hello import ForeignHello
from packhorse.wire.messages import Hello
from packhorse_service.protocol.effects import Effect
from packhorse_service.server.authentication import Clients
from packhorse_service.server.inbound import InboundMessage
from packhorse_service.server.served_stream import ServedStream

__all__ = ["RankClaims"]

log = logging.getLogger("packhorse.server")


class RankClaims:
    """Check of every HELLO against the list of ``clients``, if there is one; each wrong claim is logged once."""

    def __init__(self, clients: Clients | None) -> None:
        self._clients = clients
        self._logged: set[Violation] = set()

    def reject(self, stream: ServedStream, inbound: InboundMessage) -> list[Effect]:
        """Return how a HELLO is rejected whose key may not be this reader; nothing where it may.

        That comes before all other checks, so that others learn no contract. Only HELLO claims a rank: all that
        follows is bound to the connection that said it, and so to its key.
        """
        session, hello = stream.session, inbound.message
        if self._clients is None or not isinstance(hello, Hello | ForeignHello):
            return []
        if hello.reader not in session.spec.readers:
            return []
        violation = self._clients.claim_violation(inbound.key, session.spec.layout.rank(hello.reader))
        if violation is None:
            return []
        named = session.hellos.rejections.reject(hello, [violation])
        if named[0] not in self._logged:
            self._logged.add(named[0])
            log.warning("%s%s", stream.label, named[0])
        return [session.reject(inbound.peer, named)]
