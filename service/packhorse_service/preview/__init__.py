"""What a stream will be like, before a GPU is spent on it: ``packhorse plan`` and ``packhorse inspect``.

1. ``from_config`` runs the pipeline of a configuration up to its planned steps, without building a row;
   ``from_lengths`` does the same with nothing but the lengths of samples
2. ``plan_collector`` turns either (``planning_facts``, ``drawn_samples``) into one ``plan_report``
3. ``compare`` plans the same samples at other pack lengths and recommends one
4. ``plan_table`` shows a report, ``plan_picture`` plots it; ``docs/plan.md`` describes its JSON

``inspected_step`` says which samples of one step sit where, ``step_picture`` draws it.
"""
