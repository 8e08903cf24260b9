"""Times training steps of one model on one batch side by side, and refuses to time what is wrong."""
