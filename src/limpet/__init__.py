"""Networks that learn new things without forgetting the old ones."""

__version__ = "0.1.0.dev0"
