"""A network that we control: simulated peers, links and faults.

`swarm.emulation.simulator` runs the round agreement of whole swarms under random faults, without
threads, sockets or clocks, and checks the invariants.
"""
