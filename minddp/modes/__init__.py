"""Options that change how gradients are reduced, each in a file of its own. The core knows none of them."""
