"""A month of a peer's life in virtual time.

In minutes, the classes of `swarm-peer` run here through weeks with outages, restarts and full
disks. They see the world through ports: clock, threads, sockets, disk, libp2p and the DHT. A seed
decides the whole month. Reading order: `virtual_ports`, `kernel`, `sockets`, `virtual_dht`,
`month`, `audit`, `scenarios`, `runner`.
"""
