"""What both sides declare: the contract, the parallel layout, the facts of a trainer."""
