"""What a draft says: tokens, how sure it is, and what it drew them from."""

from typing import NamedTuple

from torch import Tensor


class Guess(NamedTuple):
    """What comes next in each of B sequences, N tokens."""

    token_ids: Tensor
    """[B, N] int64."""
    confidences: Tensor | None
    """[B, N] float32 how likely each token is right if those before it are; None: not known."""
    distributions: Tensor | None
    """[B, N, V] float32 that tokens drawn at random were drawn from; None: none were."""

    def first(self, count: int) -> "Guess":
        """A copy of what is said of the first sequences."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[:count].clone()

        token_ids = self.token_ids[:count].clone()
        return Guess(token_ids, part(self.confidences), part(self.distributions))
