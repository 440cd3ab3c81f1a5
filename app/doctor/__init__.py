"""Checks a set-up from where the service would run, and says what to do about what is wrong."""
