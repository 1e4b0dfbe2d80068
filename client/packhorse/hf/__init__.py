"""Hugging Face: a micro-batch as a causal model's keyword arguments, and a Feed as a ``Trainer``'s data.

Shapes: MBS rows (1 where rows are packed), T = width in slots, S = segments.

What silently trains across samples, measured against unpacked runs, and is therefore kept away or refused:

* an ``attention_mask``, of ones too: Transformers finds packed rows by their positions only without one;
* a cache: ``use_cache`` is on in most configurations, and packed rows are not looked for beside one;
* ``cu_seq_lens_q`` without ``position_ids``: only the flash kernels read offsets;
* three equal rows of positions where a model of mRoPE expects four, of which the first tells samples apart;
* models that look for no packed rows: attention without them, recurrent and convolution states. ``check`` refuses them.
"""

from packhorse.hf.inputs import arguments
from packhorse.hf.model_check import check
from packhorse.hf.trainer import attach

__all__ = ["arguments", "attach", "check"]
