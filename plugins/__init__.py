"""The built-in plugins, one folder a role. They use the same door as third-party ones: entry points."""
