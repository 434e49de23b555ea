"""The live page and the HTML report: what a run's records say, to look at."""
