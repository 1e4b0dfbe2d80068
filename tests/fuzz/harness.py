"""What a decoder must hold for every input: only its own errors, little memory, no hang; what it accepts is sound.

An input that breaks this is printed in hexadecimal, with the line that runs it again.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

__all__ = ["EXAMPLES", "INPUTS", "Decoder", "decodes", "stays_small"]

INPUTS = 100_000  # of each decoder, by mutation
EXAMPLES = 2_000  # of each decoder, by Hypothesis
TRACED = 1_500  # of which memory is measured
CHECKED = 8  # of so many that are accepted one is compared with what it becomes when encoded again
SECONDS = 2.0  # of processor time; a hang, or work that grows with what an input claims, takes far longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """``decode`` raises one of ``errors``, or returns what ``check`` finds sound for the input."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    check: Callable[[bytes, object], None]
    fixed_bytes: int = 1 << 19  # of memory; half of it is msgpack's stack, whatever it reads
    bytes_a_byte: int = 64  # and for each of the input

    def accepts(self, data: bytes, *, checked: bool = True) -> bool:
        """Whether an input is accepted; raises ``AssertionError`` where an invariant breaks."""
        try:
            decoded = self.decode(data)
            if checked:
                self.check(data, decoded)
        except self.errors:
            return False
        except Exception as error:
            raise AssertionError(self._broken(data, f"{type(error).__name__}: {error}")) from error
        return True

    def _broken(self, data: bytes, what: str) -> str:
        return f"{self.name}: {what}\nagain with  DECODERS[{self.name!r}].accepts(bytes.fromhex({data.hex()!r}))"

    def assert_small(self, data: bytes) -> None:
        """Whatever an input claims, no more memory is taken than the bound."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        self.accepts(data)
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before <= self.fixed_bytes + self.bytes_a_byte * len(data), self._broken(
            data, f"takes {peak - before} bytes"
        )


def decodes(decoder: Decoder, inputs: Iterable[bytes], at_least: int = INPUTS) -> int:
    """Give every input to a decoder; how many it accepted."""
    accepted = seen = 0
    slowest, now = 0.0, time.thread_time()
    for data in inputs:
        accepted += decoder.accepts(data, checked=accepted % CHECKED == 0)
        seen += 1
        now, before = time.thread_time(), now
        if now - before > slowest:
            slowest = now - before
            assert slowest < SECONDS, decoder._broken(data, f"takes {slowest:.1f} s")
    assert seen >= at_least, f"{seen} inputs are too few"
    return accepted


def stays_small(decoder: Decoder, inputs: Iterable[bytes]) -> None:
    """The same with memory measured, which takes longer."""
    tracemalloc.start()
    try:
        for data in islice(inputs, TRACED):
            decoder.assert_small(data)
    finally:
        tracemalloc.stop()
