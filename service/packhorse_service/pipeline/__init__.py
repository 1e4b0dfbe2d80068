"""The data path: ``plan_stream`` describes one stream, ``Pipeline`` runs it. Begin with ``run``."""
