"""Packhorse for a trainer rank: iterate packed micro-batches from a packing server.

    feed = packhorse.Feed("tcp://host:5555", layout=ParallelLayout(data=2), contract=BatchContract(seq_length=4096))
    for step in feed.steps():
        for micro_batch in step: ...

Read ``codec.microbatch`` for what arrives, ``contract`` and ``rules`` for what is proved at the handshake,
``protocol`` for the states of a reader, ``feed`` for the iterator and ``transport`` for its thread and socket.
"""

from packhorse.codec.microbatch import MicroBatch
from packhorse.contract.batch_contract import (
    AttentionOffsets,
    BatchContract,
    LossReduction,
    Objective,
    Packing,
    ReaderPolicy,
    Remainder,
    TailPadding,
)
from packhorse.contract.layout import Coordinates, ParallelLayout
from packhorse.contract.partition import Partition
from packhorse.contract.position import Position
from packhorse.contract.trainer_facts import TrainerFacts
from packhorse.errors import (
    AuthenticationFailed,
    ConfigError,
    ContractError,
    HandshakeRefused,
    PackhorseError,
    ProtocolError,
    ServerFailed,
    SourceError,
    StallTimeout,
    StartTimeout,
    TransportError,
)
from packhorse.feed import Feed, FeedStats
from packhorse.launching.launch import launch
from packhorse.rules import Severity, Violation

__version__ = "0.1.0"

__all__ = [
    "AttentionOffsets",
    "AuthenticationFailed",
    "BatchContract",
    "ConfigError",
    "ContractError",
    "Coordinates",
    "Feed",
    "FeedStats",
    "HandshakeRefused",
    "LossReduction",
    "MicroBatch",
    "Objective",
    "PackhorseError",
    "Packing",
    "ParallelLayout",
    "Partition",
    "Position",
    "ProtocolError",
    "ReaderPolicy",
    "Remainder",
    "ServerFailed",
    "Severity",
    "SourceError",
    "StallTimeout",
    "StartTimeout",
    "TailPadding",
    "TrainerFacts",
    "TransportError",
    "Violation",
    "__version__",
    "launch",
]
