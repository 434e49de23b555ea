"""`python -m fedkeep` is the `fedkeep` command."""

from fedkeep.cli import main

main()
