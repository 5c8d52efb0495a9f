"""Replaying recorded decision traces on our own plugins, step by step, up to the first difference."""
