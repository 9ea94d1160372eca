# %% [markdown]
# # Start here
#
# This course teaches you to keep TensorFlow training inside its memory: each lab reproduces one failure, sets the fix
# beside it and judges popular advice by measurement. Run the cells of this page with Shift+Enter, find the lab for
# your trouble below, or begin with [lab 00](00_where_memory_goes.ipynb), whose words all others use. (Without a mouse: Tab
# goes into a cell's boxes and buttons, Shift+Tab comes back to its code, and from there ↓ goes on. After a restart of the
# kernel, boxes and buttons are dead and names are gone: *Run → Run All Above Selected Cell*.) In a lab, put a
# guess into its box *before* you run the rest: being wrong by a factor of ten, and seeing why, is what you learn from.
# Solve the exercises, which grade themselves, and come back here to see how far you are and whether your guesses get closer.
#
# ## Which lab for which trouble

# %%
import labsupport as lab

lab.find_lab()

# %% [markdown]
# ## Ways through the series

# %%
lab.reading_paths()

# %% [markdown]
# ## Your progress and your guesses
#
# When you work through a lab in JupyterLab, its guess, exercises and verdicts are written to a plain text file on this
# machine, `~/.labsupport/ledger.jsonl`. Nothing is sent anywhere. Delete the file to begin anew, or set the
# environment variable `LABSUPPORT_LEDGER` to `off` before you start JupyterLab to keep nothing.

# %%
lab.progress()

# %%
lab.guesses()
