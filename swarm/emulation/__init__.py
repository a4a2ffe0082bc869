"""Emulated and simulated swarms: peers, links and faults that a test controls.

`swarm.emulation.simulator` runs the round agreement of whole swarms under random faults, without
threads, sockets or clocks, and checks the invariants.
"""
