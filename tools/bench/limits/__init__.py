"""What the machine can do at all, measured in the same minutes as the readers."""
