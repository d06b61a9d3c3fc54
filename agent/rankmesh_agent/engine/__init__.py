"""Groups, their order, and what carries out their calls."""
