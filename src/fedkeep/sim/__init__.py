"""Many devices in one process: fast, exact, resumable."""
