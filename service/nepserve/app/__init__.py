"""The HTTP front: routes, problem documents, keys, limits, metrics, health. Imports no torch."""
