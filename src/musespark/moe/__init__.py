"""The compressed mixture of experts.

pooler -> pre-expert norm -> experts, which stop after their second GEMM -> post-expert norm per
route and weighted sum -> unpooler. The router reads the block's own input, at full width.
"""
