"""Rules that running processes check: at the handshake, where offsets enter, and when a stream is made again."""

from __future__ import annotations

from packhorse.rules.model import Documentation, RuntimeRule, Severity
from packhorse.rules.stack_versions import StackVersions

__all__ = [
    "KEY_RANK",
    "KNOWN_FACTS",
    "PLACE",
    "PROTOCOL",
    "RANKS_AGREE",
    "REPLAY_DIVERGED",
    "RUNTIME_RULES",
    "STREAM",
    "THD_ROWS",
]

PROTOCOL = RuntimeRule(
    id="PROTOCOL",
    checked="Checked by the server before anything else of a HELLO is read.",
    documentation=Documentation.parse(
        """
        Server and reader speak a common version of the protocol.

        The first fields of HELLO, with the versions that a reader speaks, and all of REJECT are the same in every
        version. So an older side and a newer one understand each other well enough to say what to install.

        Source: docs/protocol.md, Versions.
        """
    ),
)

STREAM = RuntimeRule(
    id="STREAM",
    checked="Checked by the server when a reader says HELLO.",
    documentation=Documentation.parse(
        """
        The stream that a reader names is one that the server serves.

        A server has the stream `train`, and those that its configuration names under `streams`.

        Source: docs/configuration.md, streams.
        """
    ),
)

KEY_RANK = RuntimeRule(
    id="KEY_RANK",
    checked="Checked by the server when a reader says HELLO, before its contract is compared.",
    documentation=Documentation.parse(
        """
        Where the server has keys, each reader's may claim its rank.

        The server's list of clients says which ranks a key may claim.

        Source: ZeroMQ's CURVE (rfc.zeromq.org/spec/26) proves who holds a key; it knows of no ranks.
        """
    ),
)

RANKS_AGREE = RuntimeRule(
    id="RANKS_AGREE",
    checked="Checked by the server across the readers, as they say HELLO and when the first would give up waiting.",
    documentation=Documentation.parse(
        """
        All readers of a stream declare one contract, each coordinate once, and none is missing at the deadline.

        A step is of all ranks. Who is missing, claimed twice, differs or stands elsewhere is listed.

        Source: Megatron-LM core/pipeline_parallel/schedules.py: ranks that disagree on a step wait for each other.
        """
    ),
)

PLACE = RuntimeRule(
    id="PLACE",
    checked="Checked by the server when a reader says HELLO, and of the snapshot when the stream is brought there.",
    documentation=Documentation.parse(
        """
        The place at which a reader stands is one that the stream has, and the reader holds the snapshot for it.

        An index is below the number of micro-batches of a step, and the snapshot is of the step that the state names.
        Anything else is a damaged state, or one of other batch sizes, and would begin somewhere else.

        Source: docs/checkpoints.md, Going on from a checkpoint.
        """
    ),
)

KNOWN_FACTS = RuntimeRule(
    id="KNOWN_FACTS",
    severity=Severity.WARN,
    checked="Checked by the server when a reader says HELLO.",
    documentation=Documentation.parse(
        """
        Every fact that a trainer declares is one that the server knows.

        A client that is newer than the server may declare facts, or values of facts, that the server has no rule for.
        The reader is served; what only a newer server could check is not checked.

        Source: docs/protocol.md, Versions.
        """
    ),
)

THD_ROWS = RuntimeRule(
    id="THD_ROWS",
    held_against=(StackVersions.BRIDGE,),
    checked="Checked by `packhorse.adapters` where offsets leave for a stack, as no declaration can tell.",
    documentation=Documentation.parse(
        """
        A THD micro-batch has one row: offsets of several rows are refused, [1, n] is squeezed.

        Packed attention takes the offsets of one row; those of several would be read as one long list.

        Source: Megatron-Bridge training/gpt_step.py, "Packed THD batches expect micro-batch size 1".
        """
    ),
)

REPLAY_DIVERGED = RuntimeRule(
    id="REPLAY_DIVERGED",
    checked="Checked by the server when it makes a stream again for readers that have taken some of it.",
    documentation=Documentation.parse(
        """
        A stream that is made again has the rows that its readers were handed before.

        Readers go on where they stand. If data, rendering or versions have changed under the same names, what follows
        belongs to another stream, and samples would be lost or repeated in silence.

        Source: docs/design.md; the digest of a reader's last row comes with its HELLO.
        """
    ),
)

RUNTIME_RULES: tuple[RuntimeRule, ...] = (
    PROTOCOL,
    STREAM,
    KEY_RANK,
    RANKS_AGREE,
    PLACE,
    KNOWN_FACTS,
    THD_ROWS,
    REPLAY_DIVERGED,
)
