"""Times the ways to make a training step of one model on one batch, and refuses to time a wrong one."""
