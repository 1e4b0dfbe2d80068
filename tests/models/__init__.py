"""Real models on a CPU, fed by a real server; ``make models`` installs what they need."""
