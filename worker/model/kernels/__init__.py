"""What the model's operations run on, and the fast forms of them."""
