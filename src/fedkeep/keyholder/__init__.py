"""The key-holder of encrypted profiles.

It is a separate party, neither the server nor a device.
"""
