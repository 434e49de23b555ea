"""fedkeep as a guest of Flower: the only room that knows `flwr`."""
