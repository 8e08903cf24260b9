"""What a training may hold: options, footprint, plan and guard."""
