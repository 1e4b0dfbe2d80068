"""START HERE. The data path, top to bottom, from shards to framed steps; each stage is a folder.

1. ``sources``   ``shards``           which shards exist: names, sizes, digests, the manifest
2. ``loading``   ``engine``           blocks of a shard to ``TokenBlock``s (``decode``), in worker processes
3. ``mixing``    ``order``            which source gives the next sample, and from which open shard
                 ``sample_stream``    samples in that order, cut to length; remembers what is not packed yet
4. ``packing``   ``pack_stream``      those samples to micro-batches, one after the other
                 ``modes``            what a micro-batch is, by packing mode
                 ``packer``           which samples of a lookahead share a pack, by packing algorithm
5. ``planning``  ``balance_window``   the micro-batches of one or several steps to those steps
                 ``planned_step``     a step's micro-batches to (data-parallel rank, index), balanced by cost
                 ``rows``             a micro-batch to the arrays of one physical row
6. ``framing``                        a row to each rank's view of it
   ``snapshot``  ``codec``            where the stream stands behind a step, as bytes

Everything here is a pure function of the plan and the data. A stream is described once (``plan.StreamPlan``, made of
the configuration by ``plan.plan_stream``), and run step by step (``run.Pipeline``): one iterator of each stage takes
from the one before. ``resume`` says what may differ from the checkpoint on resuming. ``protocol`` and ``server``
carry the steps to the readers.
"""
