"""Arrays in the memory of GPUs: what they are, and what moves and reduces them there."""
