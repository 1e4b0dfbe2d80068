"""``packhorse loadtest``: many simulated ranks against a server, and what they saw.

The path through this folder:

1. ``scenario/`` is what is asked for: a file, options, thresholds on the figures of ``measured``, synthetic data
2. ``run/setup`` decides all of it: data, layout, which rank does what
3. ``run/coordinator`` starts ``packhorse serve`` and the ``workers``, and sees from outside what they take (``usage``)
4. ``ranks/worker`` is one of these processes: a ``swarm`` of simulated ranks, each a real client session on a socket of
   its own, commanded and reporting by ``worker_messages``
5. ``report/outcome`` is the result, computed once from ``run/measurements``; table, page and live display show it

``load_test`` does all of this in order. Nothing is imported here: the workers need little of it.
"""
