"""What the stages are compared with: float64 attention, the contract's cases, the tolerance, and planted mistakes."""
