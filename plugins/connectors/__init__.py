"""What moves KV between engines and tiers."""
