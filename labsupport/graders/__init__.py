"""What tells a right answer to an exercise from a wrong one, a file a lab, named as the lab is without its number.

A bound on memory, such as 0.5 * whole, stands between what right answers take and wrong ones. Those are the cells of each
exercise in tools/source; tests/test_labs.py runs them all. In one run of all, right answers took half of such a bound (the
median of 57), wrong ones twice as much. Nearer than a tenth came answers that are numbers themselves (a batch, a buffer, a
count of segments), and the part of lab 13. Tolerances of numbers, 0.0001 to 0.01, are for another order of float32's sums:
right answers took an eighth of one at most, wrong ones three times as much at least.
"""
