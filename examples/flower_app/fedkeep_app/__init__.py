"""A Flower app whose devices keep what fedkeep tells them to keep."""
