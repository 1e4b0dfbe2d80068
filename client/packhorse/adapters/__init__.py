"""Micro-batches in the spelling of each training stack. Thin: they only rename.

| module              | gives                                                                     |
|---------------------|---------------------------------------------------------------------------|
| ``megatron_core``   | ``PackedSeqParams`` of the installed version                              |
| ``megatron_bridge`` | batch dictionaries, current and legacy keys                                |
| ``megatron_lm``     | the dictionaries of Megatron-LM's own ``get_batch``                       |
| ``varlen``          | arguments of FlashAttention and PyTorch's variable-length attention, and  |
|                     | ``seq_idx`` for state-space layers                                        |

They take a ``MicroBatch`` of torch tensors, where they lie, and need torch; only ``varlen.seq_idx`` waits for a
device. Stacks that cut rows for context parallelism themselves get whole rows: giving them a slice is refused.

**Offsets for attention.** Padding trails the real slots of its segment, so causal attention over *physical*
offsets is exact. That is the default: physical offsets wherever attention looks, and no flag for padding
between segments, so that no attention backend is ruled out. Models that are not causal set
``attention_offsets: logical`` and get logical offsets beside padded ones. The contract chooses once, for the
whole job; a micro-batch's contents never do, or the backend would change from one to the next.
"""
