"""Bascule: a bridge between Claude Managed Agents sessions and tools behind webhooks."""

