"""Postgres: functions over a connection."""
