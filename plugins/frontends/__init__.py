"""What serves people."""
