"""The core of Sixhooks: hook specs, types, plugin registry, configuration, step loop, invariants."""
