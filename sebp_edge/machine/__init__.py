"""What this machine has: devices, their memory, and what this process holds of it."""
