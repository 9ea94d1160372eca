"""Tools for one's own code: the doctor for a script, checks for tests, and a cell magic. Nothing that the labs need."""
