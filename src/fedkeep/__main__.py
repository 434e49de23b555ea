"""`python -m fedkeep` is the `fedkeep` command."""

from fedkeep.cli import main

if __name__ == "__main__":
    main()
