"""The migrations, numbered, one sentence each."""
