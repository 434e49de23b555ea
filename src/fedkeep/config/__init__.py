"""Configuration: the tables of experiments, fleets and agents, and the components they name."""
