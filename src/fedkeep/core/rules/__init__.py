"""Rules that an operator writes: which samples are kept, or never stored, whatever their value."""
