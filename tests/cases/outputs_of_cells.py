"""Symptom: in a notebook memory rises cell by cell, and del and gc.collect() bring nothing back (nimasarang.com/blog/2026-03-07-jupyter-memory-leak; the traceback's part: nbviewer gist 4df8a6f4bdcb7cc8b29a552b58f787b8).

Mechanism: the value of a cell's last line is kept in Out[n] and _n for as long as the kernel lives.
Fix: end the line with a semicolon, or give the value a name and delete it; Out is then not written.
"""

# kind: retained tensors
# budget: 384 MiB
import sys

import tensorflow as tf
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()  # what a kernel runs its cells with
shell.user_ns["tf"] = tf
shell.displayhook.write_output_prompt = shell.displayhook.write_format_data = lambda *_, **__: None
end = ";" if "--fixed" in sys.argv else ""
weight = tf.Variable(tf.random.normal([512, 512], stddev=0.02))
shell.user_ns["weight"] = weight
for cell in range(100):
    shell.run_cell(
        "with tf.GradientTape() as tape:\n    y = tf.matmul(tf.random.normal([512, 512]), weight)\n    loss = tf.reduce_mean(y)\nweight.assign_sub(tape.gradient(loss, weight))",
        store_history=True,
    )
    shell.run_cell(f"del y\nshown = tf.random.normal([512, 512])\nshown{end}", store_history=True)  # 1 MiB
print(len(shell.user_ns["Out"]), "outputs kept")
