"""The Managed Agents API over HTTP, and its event streams as bytes."""
