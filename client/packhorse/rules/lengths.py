"""Rules about sizes: micro-batch, sequence lengths, alignment, batch sizes, ids."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packhorse.contract.trainer_facts import Stack
from packhorse.rules.model import Breach, RuleInput, Severity
from packhorse.rules.multiples import near_multiples

__all__ = [
    "constant_step",
    "cp_length",
    "dtype_range",
    "gbs_divides",
    "max_position",
    "mbs_in_batch",
    "mbs_online",
    "pack_align",
    "segment_align",
    "seq_length_match",
    "world",
]

ID_LIMIT = 1 << 31


def mbs_online(given: RuleInput) -> Iterator[Breach]:
    """Packs built online, or from isolated documents, are micro-batches of one: micro_batch_size == 1.

    A THD row already holds many samples, and kernels take one row with one list of offsets. More tokens a
    micro-batch come from a longer row.

    Source: Megatron-Bridge training/config.py, "Micro batch size should be 1 when training with packed sequence".
    """
    mbs, contract = given.contract.micro_batch_size, given.contract
    if mbs > 1:
        gbs, length = max(1, contract.global_batch_size // mbs), contract.seq_length * mbs
        remedy = f"the same tokens a step: micro_batch_size 1, global_batch_size {gbs}, seq_length {length}"
        yield Breach("micro_batch_size", "1", str(mbs), remedy)


def mbs_in_batch(given: RuleInput) -> Iterator[Breach]:
    """Packing in the batch needs samples to pack: micro_batch_size > 1.

    The samples of a micro-batch are flattened to one row; one sample a row would be packing in name only.

    Source: Megatron-Bridge training/config.py, "micro_batch_size should be greater than 1".
    """
    if given.contract.micro_batch_size == 1:
        share = 2 * given.layout.data
        remedy = f"micro_batch_size 2 with global_batch_size a multiple of {share}, or packing online"
        yield Breach("micro_batch_size", "2 or more", "1", remedy)


def cp_length(given: RuleInput) -> Iterator[Breach]:
    """With CP > 1 seq_length divides by 2·CP (zigzag and whole rows) or CP (contiguous), in every mode.

    Each context-parallel rank takes two chunks of a row, one from each end, so that causal work is equal.

    Source: Megatron-Bridge training/config.py; Megatron-LM training/arguments.py, validate_args.
    """
    unit = given.contract.partition.granularity(given.layout.context)
    length = given.contract.seq_length
    if length % unit:
        yield Breach("seq_length", f"a multiple of {unit}", str(length), near_multiples(length, unit))


def segment_align(given: RuleInput) -> Iterator[Breach]:
    """segment_multiple is a multiple of 2·CP (CP for contiguous), over training and evaluation CP.

    THD kernels cut every segment for the context-parallel ranks. The default also covers sequence
    parallelism, lcm(2·CP, CP·TP); a smaller value wastes less padding, as only the whole row needs CP·TP
    and pack_multiple sees to that.

    Source: Transformer Engine's THD partition (every offset divides by 2·CP); Megatron-Bridge derives the default.
    """
    partition, contract = given.contract.partition, given.contract
    unit = math.lcm(partition.granularity(given.layout.context), partition.granularity(contract.evaluation_context))
    got = contract.segment_multiple
    if got % unit:
        both = math.lcm(got, unit)
        wider = f", or to {both} to keep {got}" if both != unit else ""
        remedy = f"set segment_multiple to {unit}{wider}, or leave it out"
        yield Breach("segment_multiple", f"a multiple of {unit}", str(got), remedy)


def pack_align(given: RuleInput) -> Iterator[Breach]:
    """seq_length divides by lcm(segment_multiple, pack_multiple).

    Otherwise the padding behind the last sample of a full row could not itself be cut evenly.

    Source: Megatron-Bridge training/config.py, "must be divisible by the CP/SP collate padding multiple".
    """
    unit, length = given.contract.row_multiple, given.contract.seq_length
    if length % unit:
        want = f"a multiple of {unit} = lcm(segment_multiple, pack_multiple)"
        yield Breach("seq_length", want, str(length), near_multiples(length, unit))


def gbs_divides(given: RuleInput) -> Iterator[Breach]:
    """global_batch_size divides by micro_batch_size · DP, with at least one micro-batch.

    Every data-parallel rank runs the same number of micro-batches in every step; one more on some would
    leave the others in a collective. The same holds of the evaluation's sizes, where the trainer declares them.

    Source: Megatron-LM core/num_microbatches_calculator.py; training/arguments.py, eval_global_batch_size.
    """
    contract, facts, data = given.contract, given.trainer, given.layout.data
    share, got = contract.micro_batch_size * data, contract.global_batch_size
    if got % share:
        want = f"a multiple of micro_batch_size · DP = {share}"
        yield Breach("global_batch_size", want, str(got), near_multiples(got, share))
    sizes = (facts.eval_micro_batch_size, facts.eval_global_batch_size)
    share = (sizes[0] or contract.micro_batch_size) * data
    got = sizes[1] or contract.global_batch_size
    if sizes != (None, None) and got % share:
        want = f"a multiple of eval_micro_batch_size · DP = {share}"
        yield Breach("eval_global_batch_size", want, str(got), near_multiples(got, share))


def constant_step(given: RuleInput) -> Iterator[Breach]:
    """A step has the same number of micro-batches from the first to the last: no schedule, no ramp-up, no decrease.

    Positions, snapshots and windows count micro-batches of whole steps. Decreasing does nothing where
    global_batch_size divides. Megatron-Bridge hands no schedule to its calculator: there it is a warning, as the
    setting has no effect.

    Source: Megatron-LM core/num_microbatches_calculator.py, step_batch_size_schedule, decrease_batch_size_if_needed
    and, until it was ignored, rampup_batch_size; Megatron-Bridge training/initialize.py.
    """
    facts = given.trainer
    divides = given.contract.global_batch_size % (given.contract.micro_batch_size * given.layout.data) == 0
    found = {
        "rampup_batch_size": facts.rampup_batch_size,
        "step_batch_size_schedule": facts.step_batch_size_schedule,
        "decrease_batch_size_if_needed": facts.decrease_batch_size_if_needed
        and (not divides or facts.step_batch_size_schedule),
    }
    idle = {"step_batch_size_schedule"} if facts.stack is Stack.MEGATRON_BRIDGE else set()
    for name in (name for name, on in found.items() if on):
        remedy = f"turn {name} off, or train each batch size as a job of its own"
        yield Breach(name, "off", "on", remedy, Severity.WARN if name in idle else None)


def world(given: RuleInput) -> Iterator[Breach]:
    """The world size is DP·CP·TP·PP, with a whole number of data-parallel ranks.

    The expert axis shares ranks with the others and does not enter.

    Source: Megatron-Bridge training/config.py, "not divisible by total_model_size".
    """
    got, layout = given.trainer.world_size, given.layout
    if got is None or got == layout.world_size or (given.trainer.weight_shards or 1) > 1:
        return  # a further axis of weights has a rule of its own
    share = layout.context * layout.tensor * layout.pipeline
    yield Breach(
        "world_size",
        f"{layout.world_size}, the product of {layout}",
        str(got),
        f"set layout.data to {got // share}" if got % share == 0 else f"start {layout.world_size} ranks",
    )


def seq_length_match(given: RuleInput) -> Iterator[Breach]:
    """The lengths that the trainer declares for its model and its data equal seq_length.

    Pipeline stages allocate receive buffers of the model's length; another width hangs or corrupts.

    Source: Megatron-Bridge training/config.py, "sequence length configuration in model config and dataset config".
    """
    want = given.contract.seq_length
    for name in ("model_seq_length", "data_seq_length"):
        got = getattr(given.trainer, name)
        if got not in (None, want):
            yield Breach(name, f"{want}, the stream's seq_length", str(got), f"set it to {want} on the trainer")


def max_position(given: RuleInput) -> Iterator[Breach]:
    """A position table or limit that the trainer declares holds at least seq_length positions.

    A sample may fill a row alone, and its positions then run to seq_length - 1.

    Source: Megatron-LM training/arguments.py, validate_args.
    """
    got, length = given.trainer.max_position_embeddings, given.contract.seq_length
    if got is not None and got < length:
        remedy = f"set max_position_embeddings to {length} or more, or serve a seq_length of at most {got}"
        yield Breach("max_position_embeddings", f"at least {length}", str(got), remedy)


def dtype_range(given: RuleInput) -> Iterator[Breach]:
    """Token ids, the padding id among them, fit the vocabulary and 32 bits; counts are integers, masks are 0 or 1.

    Ids travel as 16 bits where the vocabulary allows, else as 32. Counts and offsets never travel as
    float32, which is not exact above 2²⁴. A fractional loss weight is refused by name where the sample is read.

    Source: Megatron-LM broadcasts scalars between stages as float32; integers on our wire avoid that.
    """
    vocab, pad = given.contract.vocab_size, given.contract.pad_id
    if vocab > ID_LIMIT:
        yield Breach("vocab_size", "1 … 2³¹", str(vocab), "declare the tokenizer's vocabulary, below 2147483648")
    if not 0 <= pad < vocab:
        yield Breach("pad_id", f"an id below the vocabulary of {vocab}", str(pad), "use 0, or another id that exists")
