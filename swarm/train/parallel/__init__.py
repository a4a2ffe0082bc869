"""One peer of several processes with a device each, behind the interface of an engine."""
