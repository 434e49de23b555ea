"""The tests of this folder need the privacy extra."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("cryptography") else ["test_*.py"]
