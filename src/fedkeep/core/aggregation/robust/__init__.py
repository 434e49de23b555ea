"""A robust mean in four stages: validate, clip, filter, reweight."""
