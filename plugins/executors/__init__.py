"""What computes a plan."""
