"""What a fleet does, without its data: one specification for simulator, server and devices."""
