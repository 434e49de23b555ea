"""The paper, in numpy: no torch, no clock, no files, no global randomness."""
