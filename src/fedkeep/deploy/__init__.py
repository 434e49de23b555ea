"""The machines of a fleet: keys, command lines, processes; all that runs Flower without knowing its API."""
