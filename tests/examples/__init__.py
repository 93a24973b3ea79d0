"""The examples: what they change, and that nothing else changes."""
