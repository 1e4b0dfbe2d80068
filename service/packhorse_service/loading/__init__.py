"""Blocks of shards to tokens: the loading engine, and what its worker processes run. Read in the order of the path:

1. ``block``        ``BlockRequest`` and ``TokenBlock``: what travels to a loader and back
2. ``engine``       ``BlockStore``: blocks by request, loaded ahead by an ``Engine``, here or in processes
3. ``decode``       ``BlockLoader.load``: one block, read by ``sources``, its samples decoded and encoded to ids
4. ``tokenizer``    text → ids, and the loss mask of what is trained on
5. ``token_block``  the samples' ids, checked as a whole and joined to a ``TokenBlock``

``mixing.open_blocks`` asks the store for blocks; nothing here knows the order of samples.
"""
