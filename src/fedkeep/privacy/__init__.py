"""Differential privacy, secure aggregation and encrypted profiles: all that leaves a device."""
