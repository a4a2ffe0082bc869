"""Discrete-event simulation of the round agreement under faults.

One seed gives one schedule: a swarm, its faults and every delay. Nodes are real `RoundMachine`s
with the real adoption rules. Disks, links, trainers and arithmetic are simulated. Values are
symbols that record how they were made. A violated invariant can be replayed, step by step, from the
fault class and the seed. Reading order: `fault_schedule`, `faults.world`, `peers.simulated_peer`,
`peers.invariants`, `faults.faults`, `faults.extended`.
"""
