"""The messages between servers, devices and operators, and how they become bytes."""
