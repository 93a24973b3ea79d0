"""What only makes a step faster, and can be switched off in one place."""
