"""Holds leases, feeds notices to the core and performs its effects."""
