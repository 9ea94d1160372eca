"""Will it fit? The memory of a training step, from its graph, before anything is allocated. It knows ground, peak and showing."""
