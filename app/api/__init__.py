"""The HTTP surface: writes wishes, reads state."""
