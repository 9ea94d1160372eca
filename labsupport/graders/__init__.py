"""What tells a right answer to an exercise from a wrong one, a file a lab, named as the lab is without its number."""
