"""Bascule: a bridge between Claude Managed Agents sessions and tools behind webhooks."""

__version__ = "0.1.0"
