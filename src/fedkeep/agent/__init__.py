"""The device agent.

A small process that reads a stream, keeps what is worth keeping, and survives a power cut.
"""
