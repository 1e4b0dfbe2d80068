"""The one deterministic order of samples, and how it resumes. Read in the order of the path:

1. ``order``           ``OrderCursor``: which source, and which of its open shards, gives the next sample (WF²Q)
                       (``permutation``: seeded shuffles that no library changes)
2. ``open_blocks``     ``OpenBlocks``: the blocks that the samples lie in, of one source, loaded ahead of their turn
3. ``sample_cutter``   ``SampleCutter``: samples that are faulty, over length or not trained on
                       (``over_length``: the policies, and the history of lengths at which a stream cut;
                       ``unsupervised``: the policies for pieces without a trained target)
4. ``prefetched_run``  ``PrefetchedRun``: samples of a single source that need no look, many at once
5. ``sample_stream``   ``SampleStream``: puts these together, ``draw(demand)`` → ``Piece``s (``piece``)
6. ``replay_log``      ``ReplayLog``: what is packed, and the ``StreamCursor`` from which a stream resumes
7. ``source_counts``   the account of every target of each source

``pipeline.run`` draws from the stream, and tells it what was packed.
"""
