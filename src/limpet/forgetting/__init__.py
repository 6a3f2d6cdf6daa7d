"""What training has cost the old data, measured, and how to undo it."""
