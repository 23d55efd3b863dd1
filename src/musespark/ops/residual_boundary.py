"""The boundary between two sub-layers: post-norm, gated blend, pre-norm, in one step.

    stream' = alpha * stream + beta * rms(branch * post_gain, post_eps)
    normed  = rms(stream', pre_eps) * pre_gain

The stream is float32 and never rounded; the normed branch is not rounded either. Only `normed`,
the next sub-layer's input, is rounded to the compute dtype, once.
"""

from torch import Tensor

from musespark.ops.rms_norm import rms_norm, rms_norm_reference, root_mean_square


def blend_reference(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
) -> Tensor:
    """The first formula above. Arguments as for `residual_boundary`."""
    post = rms_norm_reference(branch, post_gain, post_eps, scale_input=True, out_dtype=stream.dtype)
    return alpha * stream + beta * post


def residual_boundary_reference(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
) -> tuple[Tensor, Tensor]:
    """Both formulas above. Arguments as for `residual_boundary`."""
    stream = blend_reference(stream, branch, alpha, beta, post_gain, post_eps)
    return rms_norm_reference(stream, pre_gain, pre_eps, out_dtype=branch.dtype), stream


def blend(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
) -> Tensor:
    """The new stream [T, D] float32, without the next pre-norm. Arguments as below."""
    wide = branch.to(stream.dtype) if post_gain is None else branch * post_gain
    root = root_mean_square(wide, post_eps)
    return (alpha * stream).addcdiv_(wide * beta, root)


def residual_boundary(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
) -> tuple[Tensor, Tensor]:
    """Blend a branch into the stream and norm the result for the next sub-layer.

    Args:
        stream: [T, D] float32, the residual stream before the blend.
        branch: [T, D] in the compute dtype, what the sub-layer returned.
        alpha, beta: [D] float32, from `residual_gate`.
        post_gain: [D] float32, multiplied into the branch before its norm; None: no weight.
        post_eps: of the branch's norm.
        pre_gain: [D] float32, of the next sub-layer's input norm.
        pre_eps: of that norm.

    Returns:
        (normed [T, D] in branch's dtype, new stream [T, D] float32).
    """
    stream = blend(stream, branch, alpha, beta, post_gain, post_eps)
    return rms_norm(stream, pre_gain, pre_eps, out_dtype=branch.dtype), stream
