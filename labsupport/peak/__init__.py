"""The peak taken apart: in a run of its own, who held each byte. It knows the ground floor alone."""
