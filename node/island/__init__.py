"""The daemon's side of an island: its ranks as processes, its speed, what it contributes when."""
