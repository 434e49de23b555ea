"""FedAvg in torch, to compare a round with."""
