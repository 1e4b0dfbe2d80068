"""A server of this job's own, for one node: ``launch`` starts it, and ``LocalServer`` is its process.

``job_place`` says which rank of a job this is and where the job's server listens, ``runtime_folder`` in what folder.
"""
