"""Secure aggregation: the server learns sums over devices and no single report."""
