"""The Managed Agents sessions API as a scripted, seeded world, and a server that puts it on a loopback port.

`world` is the model: no I/O, no clock, no chance. `server` speaks HTTP and SSE for it. Scenarios, the
scripts that its agents play, are described in `script`; the faults that it can show, in `switches`.
"""
