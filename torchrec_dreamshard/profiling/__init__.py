"""Measuring what placements cost: on hardware through FBGEMM and torch.distributed, or by an analytic model."""
