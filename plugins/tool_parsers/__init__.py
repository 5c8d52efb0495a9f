"""How models write tool calls."""
