"""What changes how gradients are reduced, each in a file of its own; the core knows none of them."""
