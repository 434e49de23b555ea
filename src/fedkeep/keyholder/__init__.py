"""The key-holder of encrypted profiles: a party of its own, apart from the server and from every device."""
