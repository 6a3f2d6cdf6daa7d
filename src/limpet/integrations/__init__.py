"""Callbacks for the training loops of other libraries, each in a file that imports its library."""
