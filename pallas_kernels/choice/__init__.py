"""What share of a token's attention every resource would get, by pooled keys."""

from pallas_kernels.choice.interface import IMPLEMENTATIONS, Precision, scores_of_experts, shares, shares_of_scores

__all__ = ["IMPLEMENTATIONS", "Precision", "scores_of_experts", "shares", "shares_of_scores"]
