"""What a stream will be like, before a GPU is spent on it: ``packhorse plan`` and ``packhorse inspect``.

1. ``feed`` runs the pipeline of a configuration up to its planned steps, without building a row;
   ``lengths`` does the same with nothing but the lengths of samples
2. ``collector`` turns either into one ``report``
3. ``comparing`` plans the same samples at other pack lengths and recommends one
4. ``table`` shows a report, ``picture`` plots it; ``docs/plan.md`` describes its JSON

``step`` says which samples of one step sit where, ``step_picture`` draws it.
"""
