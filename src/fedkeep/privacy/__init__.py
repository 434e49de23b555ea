"""What leaves a device, bounded, accounted and, where wanted, encrypted."""
