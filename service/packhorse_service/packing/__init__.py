"""Samples to micro-batches, by packing mode and packing algorithm.

``pack_stream`` draws samples for a mode (``modes``) and gives micro-batches one after the other. The mode ``online``
has a packer choose which samples of a lookahead share a pack: ``packing_plan`` names and describes the algorithms,
``packer`` is their interface and their table, ``fifo_exact_tail`` and ``decreasing`` are the algorithms.

To add one: a module with a class like ``DecreasingPacker``, a member of ``PackingAlgorithm``, a row of ``PACKERS``.
The tests go through every member of that enum.
"""
