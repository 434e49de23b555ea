"""The live page and the HTML report of runs."""
