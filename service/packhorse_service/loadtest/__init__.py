"""``packhorse loadtest``: many simulated ranks against a server, and what they saw.

The path through this folder:

1. ``scenario`` is what is asked for: a file, options, thresholds (``thresholds``) on metrics (``metrics``)
2. ``preparing`` decides all of it: data (``synthetic``), layout, which rank does what
3. ``coordinator`` starts ``packhorse serve`` and the ``workers``, and looks at them from outside (``observing``)
4. ``worker`` is one of these processes: a ``swarm`` of ``rank``s, each a real client session, talking ``messages``
5. ``outcome`` is the result, computed once from the ``results``; ``display``, ``table``, ``page`` show it

``running`` does all of this in order. Nothing is imported here: the workers need little of it.
"""
