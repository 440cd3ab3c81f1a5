"""The console: pages on which a person sees what waits and decides. It writes wishes and reads state."""
