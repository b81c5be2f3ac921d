"""Several servers on a cluster: placed, kept alive, and as many as the queue asks for.

``policy`` says how many, ``group`` keeps that many alive and lists them, ``host`` runs one on a node as an ordinary
server process (``child``), and ``ray_cluster`` is the way to Ray. Force traffic passes none of them.
"""
