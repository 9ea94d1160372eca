"""What a reader sees of a run: plots that move, still pictures, comparisons, cards. It knows the ground floor."""
