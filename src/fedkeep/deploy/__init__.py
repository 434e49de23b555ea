"""The machines of a fleet: keys, command lines and processes, without Flower's API."""
