"""Integrations with the training loops of other libraries, each in a module that imports its library."""
