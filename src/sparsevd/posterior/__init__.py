"""What a weight with noise is: the paper's equations, and the tensors that carry them."""
