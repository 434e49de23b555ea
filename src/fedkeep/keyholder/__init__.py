"""The key-holder of encrypted profiles.

A party of its own, apart from the server and from every device.
"""
